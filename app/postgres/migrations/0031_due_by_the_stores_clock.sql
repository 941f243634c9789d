-- What is due at once, or after a pause, is due by the clock of the database that looks for it: rows say in how many
-- milliseconds (`due_in_ms`), and a gateway whose own clock is ahead delays nothing. Times that a run has recorded
-- (`due_at` alone: when it wakes, when a question expires) stay what they are, and so do rows of older gateways.

-- As in 0021 but for that.
CREATE OR REPLACE FUNCTION tga.write_run_rows(numbers bigint[], schedules jsonb[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO runs AS r (stream_no, tenant, procedure, program, state, attempt, worker, due_at, failures, parent,
                           deadline_at, created_at, forked_from)
    SELECT h.stream_no, h.tenant, s.procedure, s.program, h.state, s.attempt, s.worker,
           coalesce(statement_timestamp() + s.due_in_ms * interval '1 millisecond', s.due_at), s.failures, s.parent,
           s.deadline_at, s.created_at, s.forked_from
      FROM unnest(numbers, schedules) AS u(stream_no, schedule)
      JOIN heads h ON h.stream_no = u.stream_no
     CROSS JOIN LATERAL jsonb_to_record(u.schedule) AS s(
           procedure text, program text, attempt integer, worker text, due_at timestamptz, due_in_ms bigint,
           failures integer, parent text, deadline_at timestamptz, created_at timestamptz, forked_from text)
     ORDER BY h.stream_no
        ON CONFLICT (stream_no) DO UPDATE
       SET procedure = excluded.procedure, program = excluded.program, state = excluded.state,
           attempt = excluded.attempt, worker = excluded.worker, due_at = excluded.due_at, failures = excluded.failures,
           parent = excluded.parent, deadline_at = excluded.deadline_at, created_at = excluded.created_at,
           forked_from = excluded.forked_from, held_until = NULL;

    DELETE FROM run_requests q
     USING unnest(numbers, schedules) AS u(stream_no, schedule)
     WHERE q.stream_no = u.stream_no
       AND NOT EXISTS (SELECT FROM jsonb_array_elements(u.schedule -> 'asks') AS a
                        WHERE a ->> 0 = q.path AND (a ->> 1)::bigint = q.sequence_number);
    IF EXISTS (SELECT FROM unnest(schedules) AS s(schedule) WHERE s.schedule -> 'asks' <> '[]') THEN
        INSERT INTO run_requests AS q (stream_no, path, sequence_number, tenant, expires_at, asked_at, level)
        SELECT h.stream_no, a ->> 0, (a ->> 1)::bigint, h.tenant, (a ->> 2)::timestamptz,
               (a ->> 3)::timestamptz, (a ->> 4)::integer
          FROM unnest(numbers, schedules) AS u(stream_no, schedule)
          JOIN heads h ON h.stream_no = u.stream_no
         CROSS JOIN LATERAL jsonb_array_elements(u.schedule -> 'asks') AS a
            ON CONFLICT (stream_no, path) DO UPDATE SET level = excluded.level WHERE q.level <> excluded.level;
    END IF;
END
$$;

-- As in 0024; null where none will be ready, which `greatest(0, null)` had made a 0.
CREATE OR REPLACE FUNCTION tga.next_ready_ms(of_tenant text, of_procedures text[], of_programs text[]) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN (
        SELECT ceil(1000 * extract(epoch FROM min(r.due_at) - statement_timestamp()))::bigint
          FROM unnest(of_procedures, of_programs) AS w(procedure, program)
         CROSS JOIN LATERAL (
               SELECT o.due_at FROM runs o
                WHERE o.tenant = of_tenant AND o.procedure = w.procedure AND o.program = w.program
                  AND o.state = 'SCHEDULED' AND o.due_at > statement_timestamp()
                ORDER BY o.due_at LIMIT 1) AS r);
END
$$;

-- As in 0016; the last row's `next_ms` is null where nothing will be due, for the same reason. Runs are looked for by
-- their silent workers, never all that are RUNNING, of which there may be many.
CREATE OR REPLACE FUNCTION tga.hold_due_runs(at_most integer, hold_ms integer, silent_ms integer)
RETURNS TABLE (stream text, is_lost boolean, attempt integer, held timestamptz, next_ms bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    held_until_then timestamptz := statement_timestamp() + hold_ms * interval '1 millisecond';
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN QUERY
    WITH timers AS MATERIALIZED (
        SELECT r.stream_no,
               silent_ms IS NOT NULL AND r.state = 'RUNNING'
               AND NOT EXISTS (SELECT FROM workers w WHERE w.worker = r.worker) AS is_lost
          FROM runs r
         WHERE r.due_at <= statement_timestamp() AND r.state <> 'SCHEDULED'
           AND (r.held_until IS NULL OR r.held_until <= statement_timestamp())
         ORDER BY r.due_at LIMIT at_most FOR UPDATE SKIP LOCKED
    ), deadlines AS MATERIALIZED (
        SELECT r.stream_no FROM runs r
         WHERE r.deadline_at <= statement_timestamp()
           AND (r.held_until IS NULL OR r.held_until <= statement_timestamp())
         ORDER BY r.deadline_at LIMIT at_most FOR UPDATE SKIP LOCKED
    ), lost AS MATERIALIZED (
        SELECT r.stream_no FROM workers w
         CROSS JOIN LATERAL (
               SELECT o.stream_no FROM runs o
                WHERE o.worker = w.worker AND o.state = 'RUNNING'
                  AND (o.held_until IS NULL OR o.held_until <= statement_timestamp())
                LIMIT at_most FOR UPDATE SKIP LOCKED) AS r
         WHERE w.seen_at < statement_timestamp() - silent_ms * interval '1 millisecond'
         LIMIT at_most
    ), due AS (
        SELECT t.stream_no, t.is_lost FROM timers t
         UNION ALL SELECT d.stream_no, false FROM deadlines d
         UNION ALL SELECT l.stream_no, true FROM lost l
    ), chosen AS MATERIALIZED (
        SELECT d.stream_no, bool_or(d.is_lost) AS is_lost FROM due d GROUP BY d.stream_no LIMIT at_most
    )
    UPDATE runs r SET held_until = held_until_then
      FROM chosen c JOIN heads h ON h.stream_no = c.stream_no
     WHERE r.stream_no = c.stream_no
    RETURNING h.stream::text, c.is_lost, r.attempt, r.held_until, NULL::bigint;

    -- Workers that are long gone, and hold nothing.
    DELETE FROM workers w
     WHERE w.worker = ANY (ARRAY(
           SELECT o.worker FROM workers o WHERE o.seen_at < statement_timestamp() - interval '1 day'
              AND NOT EXISTS (SELECT FROM runs r WHERE r.worker = o.worker AND r.state = 'RUNNING')
            LIMIT 100 FOR UPDATE SKIP LOCKED));

    RETURN QUERY
    SELECT NULL::text, NULL::boolean, NULL::integer, NULL::timestamptz,
           ceil(1000 * extract(epoch FROM least(
               (SELECT r.due_at FROM runs r WHERE r.due_at > statement_timestamp() AND r.state <> 'SCHEDULED'
                 ORDER BY r.due_at LIMIT 1),
               (SELECT r.deadline_at FROM runs r WHERE r.deadline_at > statement_timestamp()
                 ORDER BY r.deadline_at LIMIT 1)) - statement_timestamp()))::bigint;
END
$$;
