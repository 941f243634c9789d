-- With a trace's payloads goes what was folded from them: who decided, by which rules, how the tool answered and how
-- often it was asked. What remains is what a rebuild would find, from entries. Counts stay: they name nobody.
--
-- The lock of the fold: one that has read the payloads and not yet written would bring the facts back.
CREATE FUNCTION tga.erase_facts() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, tga, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(tree_lock_key('calls'));
    UPDATE call_facts c
       SET decided_by = NULL, decider = NULL, error_code = NULL, attempts = 0, dispatch_ms = NULL,
           policy_ids = CASE WHEN c.policy_ids IS NOT NULL THEN ARRAY[]::text[] END
      FROM heads h WHERE h.stream = NEW.stream AND c.stream_no = h.stream_no;
    RETURN NULL;
END
$$;

CREATE TRIGGER facts_erased AFTER INSERT ON tga.erasures FOR EACH ROW EXECUTE FUNCTION tga.erase_facts();
ALTER TABLE tga.erasures ENABLE ALWAYS TRIGGER facts_erased;
REVOKE ALL ON FUNCTION tga.erase_facts FROM PUBLIC;

-- Traces that were erased before.
UPDATE tga.call_facts c
   SET decided_by = NULL, decider = NULL, error_code = NULL, attempts = 0, dispatch_ms = NULL,
       policy_ids = CASE WHEN c.policy_ids IS NOT NULL THEN ARRAY[]::text[] END
  FROM tga.heads h JOIN tga.erasures e ON e.stream = h.stream
 WHERE c.stream_no = h.stream_no;

-- As in 0023, but nothing is no time: `greatest` made 0 of it, and a rebuild counted erased calls as answered at once.
CREATE OR REPLACE FUNCTION tga.milliseconds(began timestamptz, ended timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
    $$ SELECT CASE WHEN ended - began IS NOT NULL
                   THEN greatest(0, round(extract(epoch FROM ended - began) * 1000))::bigint END $$;
