-- Sessions of the console that were ended before their time, and sign-ins whose answer was taken. Not part of the
-- ledger. A row is needed until the session or sign-in would have ended anyway, and goes some time after that.

CREATE TABLE tga.spent_sessions (
    digest bytea PRIMARY KEY CHECK (octet_length(digest) = 32),  -- SHA-256 of the session's id
    until  timestamptz NOT NULL
);

CREATE INDEX spent_sessions_by_end ON tga.spent_sessions (until);

-- Whether it was not spent before. Every gateway hears of it on the channel of keys. Old rows go along, a few at a
-- time, an hour late: gateways' clocks may differ.
CREATE FUNCTION tga.spend_session(spent bytea, spent_until timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    is_first boolean;
BEGIN
    PERFORM prepare_transaction(5000);
    INSERT INTO spent_sessions (digest, until) VALUES (spent, spent_until) ON CONFLICT DO NOTHING;
    is_first := FOUND;
    IF is_first THEN
        PERFORM pg_notify('tga_access', 'session:' || encode(spent, 'hex'));
    END IF;
    DELETE FROM spent_sessions s
     WHERE s.digest IN (SELECT o.digest FROM spent_sessions o WHERE o.until < clock_timestamp() - interval '1 hour'
                         ORDER BY o.until LIMIT 100 FOR UPDATE SKIP LOCKED);
    RETURN is_first;
END
$$;

GRANT SELECT ON tga.spent_sessions TO tga_gateway;
REVOKE ALL ON FUNCTION tga.spend_session FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.spend_session TO tga_gateway;
