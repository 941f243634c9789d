-- Which run goes to which worker, and what is due. Everything here is of the moment: it follows from the streams of
-- runs, and is written without a flush where losing it only means a delay.

-- A gateway that does what is due keeps the row from the others for a moment.
ALTER TABLE tga.runs ADD COLUMN held_until timestamptz;

-- Worker processes. One row each, touched by its heartbeats; puts touch nothing.
CREATE TABLE tga.workers (
    worker       text COLLATE "C" PRIMARY KEY,   -- an id that the process has chosen for its life
    tenant       text COLLATE "C" NOT NULL,
    principal_id text COLLATE "C" NOT NULL,
    name         text NOT NULL,
    programs     text[] NOT NULL DEFAULT '{}',   -- procedure, a tab, version@digest: what it last asked for
    seen_at      timestamptz NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX workers_seen ON tga.workers (seen_at);

-- Questions that runs have asked and nobody has answered.
CREATE TABLE tga.run_requests (
    stream_no       bigint NOT NULL,
    path            text COLLATE "C" NOT NULL,
    sequence_number bigint NOT NULL,             -- of the intent that asks
    tenant          text COLLATE "C" NOT NULL,
    expires_at      timestamptz,
    PRIMARY KEY (stream_no, path)
);
CREATE INDEX run_requests_listed ON tga.run_requests (tenant, stream_no, path);

-- As in 0012, and the questions that are open then.
CREATE OR REPLACE FUNCTION tga.write_run_rows(numbers bigint[], schedules jsonb[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO runs AS r (stream_no, tenant, procedure, program, state, attempt, worker, due_at, failures, parent,
                           deadline_at, created_at)
    SELECT h.stream_no, h.tenant, s.procedure, s.program, h.state, s.attempt, s.worker, s.due_at, s.failures, s.parent,
           s.deadline_at, s.created_at
      FROM unnest(numbers, schedules) AS u(stream_no, schedule)
      JOIN heads h ON h.stream_no = u.stream_no
     CROSS JOIN LATERAL jsonb_to_record(u.schedule) AS s(
           procedure text, program text, attempt integer, worker text, due_at timestamptz, failures integer,
           parent text, deadline_at timestamptz, created_at timestamptz)
     ORDER BY h.stream_no
        ON CONFLICT (stream_no) DO UPDATE
       SET procedure = excluded.procedure, program = excluded.program, state = excluded.state,
           attempt = excluded.attempt, worker = excluded.worker, due_at = excluded.due_at, failures = excluded.failures,
           parent = excluded.parent, deadline_at = excluded.deadline_at, created_at = excluded.created_at,
           held_until = NULL;

    DELETE FROM run_requests q
     USING unnest(numbers, schedules) AS u(stream_no, schedule)
     WHERE q.stream_no = u.stream_no
       AND NOT EXISTS (SELECT FROM jsonb_array_elements(u.schedule -> 'asks') AS a
                        WHERE a ->> 0 = q.path AND (a ->> 1)::bigint = q.sequence_number);
    IF EXISTS (SELECT FROM unnest(schedules) AS s(schedule) WHERE s.schedule -> 'asks' <> '[]') THEN
        INSERT INTO run_requests (stream_no, path, sequence_number, tenant, expires_at)
        SELECT h.stream_no, a ->> 0, (a ->> 1)::bigint, h.tenant, (a ->> 2)::timestamptz
          FROM unnest(numbers, schedules) AS u(stream_no, schedule)
          JOIN heads h ON h.stream_no = u.stream_no
         CROSS JOIN LATERAL jsonb_array_elements(u.schedule -> 'asks') AS a
            ON CONFLICT (stream_no, path) DO NOTHING;
    END IF;
END
$$;

-- Runs that are ready for these programs, in turn over them, kept from others for `hold_ms`: by then a lease has moved
-- them, or whoever took them is gone. `statement_timestamp`, because an index is not searched for `clock_timestamp`.
CREATE FUNCTION tga.hold_ready_runs(
    of_tenant text, of_procedures text[], of_programs text[], at_most integer, hold_ms integer
) RETURNS TABLE (stream text, procedure text, program text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN QUERY
    WITH ready AS MATERIALIZED (
        SELECT r.stream_no, r.due_at,
               row_number() OVER (PARTITION BY w.procedure, w.program ORDER BY r.due_at, r.stream_no) AS turn
          FROM unnest(of_procedures, of_programs) AS w(procedure, program)
         CROSS JOIN LATERAL (
               SELECT o.stream_no, o.due_at FROM runs o
                WHERE o.tenant = of_tenant AND o.procedure = w.procedure AND o.program = w.program
                  AND o.state = 'SCHEDULED' AND o.due_at <= statement_timestamp()
                ORDER BY o.due_at, o.stream_no LIMIT at_most FOR UPDATE SKIP LOCKED) AS r
    ), chosen AS MATERIALIZED (
        SELECT c.stream_no FROM ready c ORDER BY c.turn, c.due_at, c.stream_no LIMIT at_most
    )
    UPDATE runs r
       SET due_at = statement_timestamp() + hold_ms * interval '1 millisecond'
      FROM chosen c JOIN heads h ON h.stream_no = c.stream_no
     WHERE r.stream_no = c.stream_no
    RETURNING h.stream::text, r.procedure, r.program;
END
$$;

-- Runs that were held, and that nobody is there for after all: they are ready again.
CREATE FUNCTION tga.unhold_ready_runs(streams text[]) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    UPDATE runs r SET due_at = statement_timestamp()
      FROM unnest(streams) AS u(stream) JOIN heads h ON h.stream = u.stream
     WHERE r.stream_no = h.stream_no AND r.state = 'SCHEDULED';
END
$$;

-- Runs for which something is due, kept from others likewise: a timer, a deadline, or a worker that was silent for
-- `silent_ms` (null: workers are not looked at). A worker that nobody knows of is lost, too: its row may be gone with a
-- database that was restored. `attempt` says which one is lost: who is late with that takes no other from its worker.
-- The last row, without a stream, says how long nothing else is due.
CREATE FUNCTION tga.hold_due_runs(at_most integer, hold_ms integer, silent_ms integer)
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
          JOIN runs r ON r.worker = w.worker AND r.state = 'RUNNING'
         WHERE w.seen_at < statement_timestamp() - silent_ms * interval '1 millisecond'
           AND (r.held_until IS NULL OR r.held_until <= statement_timestamp())
         LIMIT at_most FOR UPDATE OF r SKIP LOCKED
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
           greatest(0, ceil(1000 * extract(epoch FROM least(
               (SELECT r.due_at FROM runs r WHERE r.due_at > statement_timestamp() AND r.state <> 'SCHEDULED'
                 ORDER BY r.due_at LIMIT 1),
               (SELECT r.deadline_at FROM runs r WHERE r.deadline_at > statement_timestamp()
                 ORDER BY r.deadline_at LIMIT 1)) - statement_timestamp())))::bigint;
END
$$;

-- Nothing was due after all: look again then. Only a row that nobody has written since it was held.
CREATE FUNCTION tga.move_due_run(of_stream text, held timestamptz, due timestamptz) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    UPDATE runs r SET due_at = due, held_until = NULL
      FROM heads h WHERE h.stream = of_stream AND r.stream_no = h.stream_no AND r.held_until = held;
    RETURN FOUND;
END
$$;

-- A worker lives. Its id is its principal's for good: another one is told that it is taken (no row at all). The runs
-- that it holds, as far as is recorded.
CREATE FUNCTION tga.beat_worker(
    of_worker text, of_tenant text, of_principal text, named text, can_run text[]
) RETURNS TABLE (stream text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off
AS $$
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    INSERT INTO workers AS w (worker, tenant, principal_id, name, programs, seen_at)
    VALUES (of_worker, of_tenant, of_principal, named, can_run, clock_timestamp())
        ON CONFLICT (worker) DO UPDATE
       SET seen_at = excluded.seen_at, name = excluded.name,
           programs = CASE WHEN can_run = '{}' THEN w.programs ELSE can_run END
     WHERE w.tenant = of_tenant AND w.principal_id = of_principal;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    RETURN QUERY
    SELECT NULL::text
     UNION ALL
    SELECT h.stream::text FROM runs r JOIN heads h ON h.stream_no = r.stream_no
     WHERE r.worker = of_worker AND r.state = 'RUNNING' AND r.tenant = of_tenant;
END
$$;

GRANT SELECT ON tga.workers, tga.run_requests TO tga_gateway;
REVOKE ALL ON FUNCTION
    tga.hold_ready_runs, tga.unhold_ready_runs, tga.hold_due_runs, tga.move_due_run, tga.beat_worker,
    tga.write_run_rows FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    tga.hold_ready_runs, tga.unhold_ready_runs, tga.hold_due_runs, tga.move_due_run, tga.beat_worker TO tga_gateway;
