-- With synchronous replication a commit is seen when a standby has it; unless the server crashed, or the wait was broken
-- off, while it waited: then it is seen at once. So what a sequencer finds at its beginning may be on this server alone,
-- and a head over it would be signed that a promoted standby cannot continue.
--
-- A commit that changes nothing, and waits like every other: when it returns, the standby has all that was seen before.
CREATE FUNCTION tga.begin_reign() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    PERFORM pg_advisory_xact_lock(tree_lock_key('tree'));
    -- A row is written, though the same one: without that there would be nothing to commit, and nothing to wait for.
    UPDATE tree_cursor SET is_only = true;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the sequencer''s cursor is missing' USING ERRCODE = 'no_data_found';
    END IF;
END
$$;

REVOKE ALL ON FUNCTION tga.begin_reign FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.begin_reign TO tga_gateway;
