-- Questions of runs that nobody has answered in time are told to others, and stay open.

INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id, verdict_field) VALUES
    ('run', 'run_escalation', 'tga/v1/run_escalation', NULL);

INSERT INTO tga.transitions (kind, from_state, artifact_type, verdict, to_state, is_birth) VALUES
    ('run', 'SCHEDULED', 'run_escalation', '', 'SCHEDULED', false),
    ('run', 'RUNNING',   'run_escalation', '', 'RUNNING',   false),
    ('run', 'WAITING',   'run_escalation', '', 'WAITING',   false);

-- Since when each question is open, by which lists are ordered, and how often it was escalated. The times of those that
-- are open now are read from the entries that ask them.
ALTER TABLE tga.run_requests ADD COLUMN asked_at timestamptz;
ALTER TABLE tga.run_requests ADD COLUMN level integer NOT NULL DEFAULT 0;
UPDATE tga.run_requests q
   SET asked_at = coalesce((SELECT (convert_from(e.entry, 'UTF8')::jsonb ->> 'recorded_at')::timestamptz
                              FROM tga.entries e
                             WHERE e.stream_no = q.stream_no AND e.sequence_number = q.sequence_number),
                           clock_timestamp());
ALTER TABLE tga.run_requests ALTER COLUMN asked_at SET NOT NULL;
DROP INDEX tga.run_requests_listed;
CREATE INDEX run_requests_listed ON tga.run_requests (tenant, asked_at, stream_no, path);

-- As before, with since when questions are open and how often they were escalated.
CREATE OR REPLACE FUNCTION tga.write_run_rows(numbers bigint[], schedules jsonb[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO runs AS r (stream_no, tenant, procedure, program, state, attempt, worker, due_at, failures, parent,
                           deadline_at, created_at, forked_from)
    SELECT h.stream_no, h.tenant, s.procedure, s.program, h.state, s.attempt, s.worker, s.due_at, s.failures, s.parent,
           s.deadline_at, s.created_at, s.forked_from
      FROM unnest(numbers, schedules) AS u(stream_no, schedule)
      JOIN heads h ON h.stream_no = u.stream_no
     CROSS JOIN LATERAL jsonb_to_record(u.schedule) AS s(
           procedure text, program text, attempt integer, worker text, due_at timestamptz, failures integer,
           parent text, deadline_at timestamptz, created_at timestamptz, forked_from text)
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
