-- A run: one execution of a durable program. A test compares these rows with app/domain/runs/transitions.py.
--
-- The owner of a run is the token of its worker's lease. Workers are other programs, often on other machines: they hold
-- no session lock here, and their life is a row of their own, so that a put renews nothing. A run therefore changes
-- its owner by entries alone: LEASED gives it one, and gateways append LOST once its worker is silent. No executor
-- takes it from a living or dead owner (`acquire`), and no recovery finds it (`recoverable`).
ALTER TABLE tga.stream_kinds DROP CONSTRAINT stream_kinds_owner_life_check;
ALTER TABLE tga.stream_kinds ADD CONSTRAINT stream_kinds_owner_life_check
    CHECK (owner_life IN ('session', 'lease', 'entries'));

-- Whether the owner of a stream of this kind lives: it holds the lock on its own id; or its lease has not run out; or
-- no entry has said otherwise, in which case it would not be the owner.
CREATE OR REPLACE FUNCTION tga.is_living(owner uuid, owner_life text, lease_until timestamptz) RETURNS boolean
LANGUAGE sql VOLATILE SET search_path = pg_catalog, tga, pg_temp
AS $$
    SELECT CASE owner_life
           WHEN 'entries' THEN true
           WHEN 'lease' THEN coalesce(lease_until > clock_timestamp(), false)
           -- Shared, and for this transaction only: two that look at one dead owner do not take each other for it.
           ELSE NOT pg_try_advisory_xact_lock_shared(executor_lock_key(owner)) END
$$;

-- Streams of a kind that nobody drives though they should be driven, oldest first: recovery's work. Those that
-- `asking` owns are among them: it knows which of them it drives, and which it has lost sight of. Of a kind whose
-- owners change by entries there are none.
CREATE OR REPLACE FUNCTION tga.recoverable(of_kind text, asking uuid, after text, at_most integer) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    -- What has ended is no work any more, and will never be again; nothing is lost if this is. Nobody looks for work
    -- of the kinds whose owners change by entries: their ended streams are swept with those of every other kind.
    PERFORM set_config('synchronous_commit', 'off', true);
    DELETE FROM in_work w
     USING (SELECT o.kind, o.stream_no
              FROM stream_kinds k JOIN in_work o ON o.kind = k.kind JOIN heads h ON h.stream_no = o.stream_no
             WHERE (k.kind = of_kind OR k.owner_life = 'entries') AND NOT h.is_open
               FOR UPDATE OF o SKIP LOCKED) AS ended
     WHERE w.kind = ended.kind AND w.stream_no = ended.stream_no;

    -- One statement, one snapshot: a stream that is taken meanwhile is either seen with its new owner or not at all.
    -- Few executors own many streams, so each executor's lock is asked for once, and not each stream.
    RETURN QUERY
    WITH work AS MATERIALIZED (
        SELECT h.stream_no, h.stream, h.owner, h.lease_until, k.owner_life
          FROM stream_kinds k
          JOIN in_work w ON w.kind = k.kind
          JOIN heads h ON h.stream_no = w.stream_no
         WHERE k.kind = of_kind AND k.owner_life <> 'entries' AND h.is_open AND h.waiting IS NULL
    ), living AS MATERIALIZED (
        SELECT o.owner FROM (SELECT DISTINCT w.owner FROM work w
                              WHERE w.owner IS DISTINCT FROM asking AND w.owner_life = 'session') AS o
         WHERE o.owner IS NOT NULL AND is_living(o.owner, 'session', NULL)
    )
    SELECT w.stream::text FROM work w
     WHERE CASE WHEN w.owner IS NULL OR w.owner = asking THEN true
                WHEN w.owner_life = 'lease' THEN NOT is_living(w.owner, 'lease', w.lease_until)
                ELSE w.owner NOT IN (SELECT l.owner FROM living l) END
       AND (after IS NULL OR w.stream_no > (SELECT h.stream_no FROM heads h WHERE h.stream = after))
     ORDER BY w.stream_no LIMIT at_most;
END
$$;

-- What a run is about is its procedure, by the name of a version. Nothing that it first waits for expires: what does
-- (a question, a sleep) is due by the scheduler's own row. `heads.waiting` says for whom it rests: worker (SCHEDULED),
-- person, time, signal, child or tool (WAITING), operator (FAILED, PARKED, DIVERGED); null while it is RUNNING.
INSERT INTO tga.stream_kinds
       (kind, id_field, entry_schema_id, birth_state, usual_end,
        tenant_path, principal_path, subject_path, name_path, owner_life)
VALUES ('run', 'run_id', 'tga/v1/run_log_entry', 'SCHEDULED', 'COMPLETED',
        '{principal,tenant}', '{principal,principal_id}', '{procedure}', '{version}', 'entries');

INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id, verdict_field) VALUES
    ('run', 'run_start',      'tga/v1/run_start',      NULL),
    ('run', 'run_attempt',    'tga/v1/run_attempt',    'change'),
    ('run', 'run_intent',     'tga/v1/run_intent',     NULL),
    ('run', 'run_checkpoint', 'tga/v1/run_checkpoint', NULL),
    ('run', 'run_answer',     'tga/v1/run_answer',     'wakes'),
    ('run', 'run_signal',     'tga/v1/run_signal',     NULL),
    ('run', 'run_suspension', 'tga/v1/run_suspension', NULL),
    ('run', 'run_end',        'tga/v1/run_end',        'outcome'),
    ('run', 'run_resumption', 'tga/v1/run_resumption', NULL);

INSERT INTO tga.transitions (kind, from_state, artifact_type, verdict, to_state, is_birth) VALUES
    ('run', 'SCHEDULED', 'run_start',      '',          'SCHEDULED', true),
    ('run', 'SCHEDULED', 'run_attempt',    'LEASED',    'RUNNING',   false),
    ('run', 'RUNNING',   'run_attempt',    'RELEASED',  'SCHEDULED', false),
    ('run', 'RUNNING',   'run_attempt',    'LOST',      'SCHEDULED', false),
    ('run', 'RUNNING',   'run_attempt',    'FAILED',    'SCHEDULED', false),
    ('run', 'SCHEDULED', 'run_attempt',    'FENCED',    'SCHEDULED', false),
    ('run', 'RUNNING',   'run_attempt',    'FENCED',    'RUNNING',   false),
    ('run', 'WAITING',   'run_attempt',    'FENCED',    'WAITING',   false),
    ('run', 'RUNNING',   'run_intent',     '',          'RUNNING',   false),
    ('run', 'RUNNING',   'run_checkpoint', '',          'RUNNING',   false),
    ('run', 'WAITING',   'run_answer',     'YES',       'SCHEDULED', false),
    ('run', 'SCHEDULED', 'run_answer',     'NO',        'SCHEDULED', false),
    ('run', 'RUNNING',   'run_answer',     'NO',        'RUNNING',   false),
    ('run', 'WAITING',   'run_answer',     'NO',        'WAITING',   false),
    ('run', 'FAILED',    'run_answer',     'NO',        'FAILED',    false),
    ('run', 'PARKED',    'run_answer',     'NO',        'PARKED',    false),
    ('run', 'DIVERGED',  'run_answer',     'NO',        'DIVERGED',  false),
    ('run', 'SCHEDULED', 'run_signal',     '',          'SCHEDULED', false),
    ('run', 'RUNNING',   'run_signal',     '',          'RUNNING',   false),
    ('run', 'WAITING',   'run_signal',     '',          'WAITING',   false),
    ('run', 'FAILED',    'run_signal',     '',          'FAILED',    false),
    ('run', 'PARKED',    'run_signal',     '',          'PARKED',    false),
    ('run', 'DIVERGED',  'run_signal',     '',          'DIVERGED',  false),
    ('run', 'RUNNING',   'run_suspension', '',          'WAITING',   false),
    ('run', 'RUNNING',   'run_end',        'COMPLETED', 'COMPLETED', false),
    ('run', 'RUNNING',   'run_end',        'DIVERGED',  'DIVERGED',  false),
    ('run', 'SCHEDULED', 'run_end',        'FAILED',    'FAILED',    false),
    ('run', 'RUNNING',   'run_end',        'FAILED',    'FAILED',    false),
    ('run', 'WAITING',   'run_end',        'FAILED',    'FAILED',    false),
    ('run', 'SCHEDULED', 'run_end',        'PARKED',    'PARKED',    false),
    ('run', 'RUNNING',   'run_end',        'PARKED',    'PARKED',    false),
    ('run', 'SCHEDULED', 'run_end',        'CANCELLED', 'CANCELLED', false),
    ('run', 'RUNNING',   'run_end',        'CANCELLED', 'CANCELLED', false),
    ('run', 'WAITING',   'run_end',        'CANCELLED', 'CANCELLED', false),
    ('run', 'FAILED',    'run_end',        'CANCELLED', 'CANCELLED', false),
    ('run', 'PARKED',    'run_end',        'CANCELLED', 'CANCELLED', false),
    ('run', 'DIVERGED',  'run_end',        'CANCELLED', 'CANCELLED', false),
    ('run', 'FAILED',    'run_resumption', '',          'SCHEDULED', false),
    ('run', 'PARKED',    'run_resumption', '',          'SCHEDULED', false),
    ('run', 'DIVERGED',  'run_resumption', '',          'SCHEDULED', false);
