-- What stands beside the streams of runs: when each is due, and the large values that their entries refer to. The
-- append function (0013) writes both in the transaction of the entries that say so.

-- One mutable row a run: who works on it, and when a gateway must look at it next. A projection of its stream, written
-- whole with each entry that changes the state; puts and heartbeats do not touch it.
CREATE TABLE tga.runs (
    stream_no   bigint PRIMARY KEY,         -- of heads
    tenant      text COLLATE "C" NOT NULL,
    procedure   text COLLATE "C" NOT NULL,
    program     text COLLATE "C" NOT NULL,  -- version@digest
    state       text COLLATE "C" NOT NULL,
    attempt     integer NOT NULL,
    worker      text COLLATE "C",           -- who holds it, while it is RUNNING
    due_at      timestamptz,
    failures    integer NOT NULL,           -- attempts that were lost or failed, since the last checkpoint
    parent      text COLLATE "C",           -- the stream of the run that started it
    deadline_at timestamptz,
    created_at  timestamptz NOT NULL
) WITH (fillfactor = 70);
CREATE INDEX runs_ready ON tga.runs (tenant, procedure, program, due_at, stream_no) WHERE state = 'SCHEDULED';
CREATE INDEX runs_due ON tga.runs (due_at) WHERE due_at IS NOT NULL AND state <> 'SCHEDULED';
CREATE INDEX runs_of_worker ON tga.runs (worker) WHERE state = 'RUNNING';
CREATE INDEX runs_deadline ON tga.runs (deadline_at) WHERE deadline_at IS NOT NULL;
CREATE INDEX runs_of_parent ON tga.runs (parent) WHERE parent IS NOT NULL;
CREATE INDEX runs_listed ON tga.runs (tenant, created_at, stream_no);
CREATE INDEX runs_in_state ON tga.runs (tenant, state, created_at);

-- The rows of these streams, each as a whole. Tenant and state are the head's: the row cannot say another state than
-- the stream stands in. Called by the append function, after the heads have moved.
CREATE FUNCTION tga.write_run_rows(numbers bigint[], schedules jsonb[]) RETURNS void
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
           parent = excluded.parent, deadline_at = excluded.deadline_at, created_at = excluded.created_at;
END
$$;

-- Large values, by what they are: the bytes stand in the object store under {tenant}/sha256/ab/<hex>. A row comes
-- before its object and goes after it, so no object is without a row.
--
--   coming  its bytes were verified, and are being made visible in the object store
--   stored  an entry can refer to it
--   used    an entry has referred to it; whether one still does is written in blob_refs
--   going   its object is being deleted; an upload of the same bytes waits until the row is gone
CREATE TABLE tga.blobs (
    tenant     text COLLATE "C" NOT NULL,
    sha256     bytea NOT NULL CHECK (octet_length(sha256) = 32),
    size_bytes bigint NOT NULL CHECK (size_bytes >= 0),
    state      text COLLATE "C" NOT NULL CHECK (state IN ('coming', 'stored', 'used', 'going')),
    touched_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, sha256)
) WITH (fillfactor = 80);
-- What collection looks at: never those that an entry refers to, however many they are.
CREATE INDEX blobs_idle ON tga.blobs (touched_at) WHERE state <> 'used';

-- Which entry refers to which blob. Rows come with the entry, and go with its payload.
CREATE TABLE tga.blob_refs (
    stream_no       bigint NOT NULL,
    sequence_number bigint NOT NULL,
    sha256          bytea NOT NULL,
    tenant          text COLLATE "C" NOT NULL,
    PRIMARY KEY (stream_no, sequence_number, sha256)
);
CREATE INDEX blob_refs_of_blob ON tga.blob_refs (tenant, sha256);

-- What speaks against plans whose entries refer to these blobs: at most one refusal a plan. Locks the blobs' rows, in
-- order, so that they stay as they were judged until the transaction ends.
CREATE FUNCTION tga.judge_blobs(plans integer[], tenants text[], digests bytea[], sizes bigint[])
RETURNS tga.plan_result[]
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    PERFORM FROM (SELECT DISTINCT u.tenant, u.sha256 FROM unnest(tenants, digests) AS u(tenant, sha256)) AS u
       JOIN blobs b ON b.tenant = u.tenant AND b.sha256 = u.sha256
      ORDER BY b.tenant, b.sha256 FOR NO KEY UPDATE OF b;
    -- A later statement than the locks: it sees what was committed before they were obtained.
    RETURN ARRAY(
        SELECT DISTINCT ON (u.plan)
               refusal(u.plan, 'RUN_BLOB_MISSING', NULL, 'an entry refers to a blob that is not stored',
                       encode(u.sha256, 'hex') || ' of ' || u.size_bytes || ' bytes',
                       CASE WHEN b.state IN ('stored', 'used') THEN b.size_bytes || ' bytes' ELSE b.state END)
          FROM unnest(plans, tenants, digests, sizes) WITH ORDINALITY AS u(plan, tenant, sha256, size_bytes, place)
          LEFT JOIN blobs b ON b.tenant = u.tenant AND b.sha256 = u.sha256
         WHERE (b.state IN ('stored', 'used') AND b.size_bytes = u.size_bytes) IS NOT TRUE
         ORDER BY u.plan, u.place);
END
$$;

-- Entries refer to blobs that were judged. The rows are updated, not only locked: a collection that waits for one of
-- them looks at it again, and sees that it was touched.
CREATE FUNCTION tga.refer_to_blobs(numbers bigint[], sequence_numbers bigint[], tenants text[], digests bytea[])
RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    UPDATE blobs b SET state = 'used', touched_at = clock_timestamp()
      FROM (SELECT DISTINCT u.tenant, u.sha256 FROM unnest(tenants, digests) AS u(tenant, sha256)) AS u
     WHERE b.tenant = u.tenant AND b.sha256 = u.sha256;
    INSERT INTO blob_refs (stream_no, sequence_number, tenant, sha256)
    SELECT DISTINCT * FROM unnest(numbers, sequence_numbers, tenants, digests)
        ON CONFLICT DO NOTHING;
END
$$;

-- An entry whose payload is erased refers to nothing any more. Its blobs are idle from now on, unless another entry
-- refers to them, which collection sees.
CREATE FUNCTION tga.drop_blob_refs() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    tenants text[];
    digests bytea[];
BEGIN
    WITH dropped AS (
        DELETE FROM blob_refs r USING erased_payloads p
         WHERE r.stream_no = p.stream_no
           AND r.sequence_number BETWEEN p.sequence_number AND p.sequence_number + cardinality(p.artifacts) - 1
        RETURNING r.tenant, r.sha256
    )
    SELECT array_agg(d.tenant), array_agg(d.sha256) INTO tenants, digests
      FROM (SELECT DISTINCT tenant, sha256 FROM dropped) AS d;
    IF tenants IS NOT NULL THEN
        PERFORM FROM unnest(tenants, digests) AS u(tenant, sha256)
           JOIN blobs b ON b.tenant = u.tenant AND b.sha256 = u.sha256
          ORDER BY b.tenant, b.sha256 FOR NO KEY UPDATE OF b;
        UPDATE blobs b SET state = 'stored', touched_at = clock_timestamp()
          FROM unnest(tenants, digests) AS u(tenant, sha256)
         WHERE b.tenant = u.tenant AND b.sha256 = u.sha256 AND b.state = 'used';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER blob_refs_go AFTER DELETE ON tga.payloads REFERENCING OLD TABLE AS erased_payloads
    FOR EACH STATEMENT EXECUTE FUNCTION tga.drop_blob_refs();
ALTER TABLE tga.payloads ENABLE ALWAYS TRIGGER blob_refs_go;

-- An upload begins. Null: there is no such blob, so its bytes are wanted. Otherwise its state and size; one that
-- entries can refer to is kept for as long as a fresh one.
CREATE FUNCTION tga.touch_blob(of_tenant text, digest bytea, OUT found_state text, OUT found_size_bytes bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    UPDATE blobs b SET touched_at = clock_timestamp()
     WHERE b.tenant = of_tenant AND b.sha256 = digest AND b.state IN ('stored', 'used')
    RETURNING b.state, b.size_bytes INTO found_state, found_size_bytes;
    IF NOT FOUND THEN
        SELECT b.state, b.size_bytes INTO found_state, found_size_bytes
          FROM blobs b WHERE b.tenant = of_tenant AND b.sha256 = digest AND b.state = 'going';
    END IF;
END
$$;

-- Its bytes are whole and verified, and are about to become visible. False: its row is going; come back later.
CREATE FUNCTION tga.begin_blob(of_tenant text, digest bytea, size bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    INSERT INTO blobs AS b (tenant, sha256, size_bytes, state) VALUES (of_tenant, digest, size, 'coming')
        ON CONFLICT (tenant, sha256) DO UPDATE SET touched_at = clock_timestamp() WHERE b.state <> 'going';
    RETURN FOUND;
END
$$;

-- Its object is durable. False: the row is going or gone, and the object with it; upload again.
CREATE FUNCTION tga.end_blob(of_tenant text, digest bytea) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    UPDATE blobs b SET state = CASE b.state WHEN 'coming' THEN 'stored' ELSE b.state END, touched_at = clock_timestamp()
     WHERE b.tenant = of_tenant AND b.sha256 = digest AND b.state <> 'going';
    RETURN FOUND;
END
$$;

-- Blobs that were not touched for `idle_ms` and that no entry refers to, marked as going; and those whose deletion was
-- begun `retry_ms` ago and not ended. The caller deletes their objects, then their rows. One caller at a time.
CREATE FUNCTION tga.take_idle_blobs(idle_ms bigint, retry_ms bigint, at_most integer)
RETURNS TABLE (tenant text, sha256 bytea, taken_at timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    tenants text[];
    digests bytea[];
BEGIN
    PERFORM prepare_transaction(5000);
    IF NOT pg_try_advisory_xact_lock(hashtextextended('blobs', 0)) THEN
        RETURN;
    END IF;
    SELECT array_agg(i.tenant), array_agg(i.sha256) INTO tenants, digests
      FROM (SELECT b.tenant, b.sha256 FROM blobs b
             WHERE b.state <> 'used'
               AND b.touched_at <= statement_timestamp() - least(idle_ms, retry_ms) * interval '1 millisecond'
               AND b.touched_at <= statement_timestamp()
                                   - CASE b.state WHEN 'going' THEN retry_ms ELSE idle_ms END * interval '1 millisecond'
             ORDER BY b.touched_at LIMIT at_most FOR UPDATE SKIP LOCKED) AS i;
    -- A later statement than the locks: it sees every reference whose entry was committed before they were obtained.
    -- One that comes later waits for this transaction, and then finds the blob going.
    RETURN QUERY
    WITH looked_at AS (
        UPDATE blobs b
           SET state = CASE WHEN b.state = 'going' OR NOT EXISTS (SELECT FROM blob_refs r
                                                                   WHERE r.tenant = b.tenant AND r.sha256 = b.sha256)
                            THEN 'going' ELSE 'used' END,
               touched_at = clock_timestamp()
          FROM unnest(tenants, digests) AS u(tenant, sha256)
         WHERE b.tenant = u.tenant AND b.sha256 = u.sha256
        RETURNING b.tenant, b.sha256, b.touched_at, b.state
    )
    SELECT l.tenant, l.sha256, l.touched_at FROM looked_at l WHERE l.state = 'going';
END
$$;

-- The objects of these blobs are deleted. Only of those that nobody else has taken since.
CREATE FUNCTION tga.forget_blobs(tenants text[], digests bytea[], times_taken timestamptz[]) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    forgotten bigint;
BEGIN
    PERFORM prepare_transaction(5000);
    DELETE FROM blobs b USING unnest(tenants, digests, times_taken) AS u(tenant, sha256, taken_at)
     WHERE b.tenant = u.tenant AND b.sha256 = u.sha256 AND b.touched_at = u.taken_at AND b.state = 'going';
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    RETURN forgotten;
END
$$;

GRANT SELECT ON tga.runs, tga.blobs, tga.blob_refs TO tga_gateway;
REVOKE ALL ON FUNCTION
    tga.write_run_rows, tga.judge_blobs, tga.refer_to_blobs, tga.drop_blob_refs, tga.touch_blob, tga.begin_blob,
    tga.end_blob, tga.take_idle_blobs, tga.forget_blobs FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    tga.touch_blob, tga.begin_blob, tga.end_blob, tga.take_idle_blobs, tga.forget_blobs TO tga_gateway;
