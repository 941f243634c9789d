-- How many runs one run may lead to: docs/adr/0064-how-many-runs-one-run-may-lead-to.md.

-- Which children of a run are open. One that starts child after child has many that have ended; all were looked at.
CREATE INDEX runs_open_children ON tga.runs (parent)
 WHERE parent IS NOT NULL AND state NOT IN ('COMPLETED', 'CANCELLED');
DROP INDEX tga.runs_of_parent;

-- The open runs below one: its children, theirs, and so on. Rows are made as they are counted, beyond `at_most` none.
-- By indexes alone: nobody knows beforehand how many there are, and a plan for many reads all runs.
CREATE FUNCTION tga.count_open_below(top text, at_most integer) RETURNS bigint
LANGUAGE sql STABLE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET max_parallel_workers_per_gather = 0
AS $$
    WITH RECURSIVE below(stream) AS (
        SELECT top COLLATE "C"
         UNION ALL
        SELECT h.stream::text
          FROM below b
          JOIN runs r ON r.parent = b.stream
          JOIN heads h ON h.stream_no = r.stream_no
         WHERE r.parent IS NOT NULL AND r.state NOT IN ('COMPLETED', 'CANCELLED'))
    SELECT count(*) - 1 FROM (SELECT FROM below LIMIT at_most + 1) AS counted
$$;
REVOKE ALL ON FUNCTION tga.count_open_below FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.count_open_below TO tga_gateway;
