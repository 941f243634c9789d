-- As in 0007, and of a run: while it has a question open. A run that asks and goes on working waits for nobody yet.
CREATE OR REPLACE FUNCTION tga.outbox_drop_decided(at_most integer) RETURNS bigint
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
    WITH decided AS MATERIALIZED (
        SELECT o.id FROM outbox o
         WHERE NOT EXISTS (
               SELECT FROM heads h
                WHERE h.stream = o.stream
                  AND (h.waiting = o.waiting
                       OR EXISTS (SELECT FROM run_requests q WHERE q.stream_no = h.stream_no)))
         ORDER BY o.id LIMIT at_most
           FOR UPDATE SKIP LOCKED
    ), dropped AS (
        DELETE FROM outbox o USING decided WHERE o.id = decided.id RETURNING 1
    )
    SELECT count(*) FROM dropped
$$;
