-- The ledger: streams of hash-chained entries, the artifacts they commit to, and what protects them.
--
-- Nothing here knows what a trace is. The rules of a kind of stream are rows of three tables, and the functions in
-- 0002 read them; a new kind is an INSERT, not a change of code.

CREATE TABLE tga.stream_kinds (
    kind            text COLLATE "C" PRIMARY KEY CHECK (kind ~ '^[a-z_]+$'),
    id_field        text NOT NULL,  -- where its entries and artifacts name their stream
    entry_schema_id text NOT NULL,
    birth_state     text NOT NULL
);

CREATE TABLE tga.artifact_rules (
    kind          text COLLATE "C" NOT NULL REFERENCES tga.stream_kinds,
    artifact_type text COLLATE "C" NOT NULL,
    schema_id     text NOT NULL,
    verdict_field text,                            -- the field that decides which state follows
    binds_field   text,                            -- the field that names the digest of the artifact before it
    settles_claim boolean NOT NULL DEFAULT false,  -- it is the effect that the stream's claim waits for
    PRIMARY KEY (kind, artifact_type)
);

CREATE TABLE tga.transitions (
    kind          text COLLATE "C" NOT NULL,
    from_state    text COLLATE "C" NOT NULL,
    artifact_type text COLLATE "C" NOT NULL,
    verdict       text COLLATE "C" NOT NULL DEFAULT '',
    to_state      text COLLATE "C" NOT NULL,
    is_birth      boolean NOT NULL DEFAULT false,
    PRIMARY KEY (kind, from_state, artifact_type, verdict, is_birth),
    FOREIGN KEY (kind, artifact_type) REFERENCES tga.artifact_rules
);

-- The stored truth is the RFC 8785 bytes, never jsonb: jsonb reorders keys and rewrites numbers.
CREATE TABLE tga.entries (
    stream          text COLLATE "C" NOT NULL CHECK (length(stream) <= 255),
    sequence_number bigint NOT NULL CHECK (sequence_number >= 1),
    entry           bytea NOT NULL CHECK (octet_length(entry) <= 65535),
    entry_digest    bytea NOT NULL CHECK (octet_length(entry_digest) = 32),
    xid             xid8 NOT NULL DEFAULT pg_current_xact_id(),  -- commit order, for the sequencer of the tree
    PRIMARY KEY (stream, sequence_number)
);

-- Apart from the entries that commit to them, so that payloads can be erased while every digest stands.
CREATE TABLE tga.artifacts (
    stream          text COLLATE "C" NOT NULL,
    sequence_number bigint NOT NULL,
    artifact        bytea NOT NULL CHECK (octet_length(artifact) <= 524288),
    PRIMARY KEY (stream, sequence_number)
);

CREATE TABLE tga.execution_checkpoints (
    stream            text COLLATE "C" NOT NULL,
    sequence_number   bigint NOT NULL,
    checkpoint_state  bytea NOT NULL,
    checkpoint_digest bytea NOT NULL CHECK (octet_length(checkpoint_digest) = 32),
    created_at        text NOT NULL,
    PRIMARY KEY (stream, sequence_number)
);

-- I2: the primary key admits one stream for a key, for ever.
CREATE TABLE tga.claims (
    server_id       text COLLATE "C" NOT NULL,
    tool_name       text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    stream          text COLLATE "C" NOT NULL UNIQUE,
    payload_digest  bytea NOT NULL CHECK (octet_length(payload_digest) = 32),
    PRIMARY KEY (server_id, tool_name, idempotency_key)
);

-- I2: one effect for a claim.
CREATE TABLE tga.claim_effects (
    stream          text COLLATE "C" PRIMARY KEY,
    artifact_digest bytea NOT NULL CHECK (octet_length(artifact_digest) = 32)
);

-- Every send after the first has its row before it leaves: the key is the fence, the rows are the count.
CREATE TABLE tga.dispatch_attempts (
    stream      text COLLATE "C" NOT NULL,
    attempt     integer NOT NULL CHECK (attempt >= 2),
    executor_id uuid NOT NULL,
    started_at  timestamptz NOT NULL,
    resolution  bytea,  -- the operator's order behind it, if there was one
    PRIMARY KEY (stream, attempt)
);

-- A projection that can be rebuilt from the entries (but for owner and waiting, which are of the moment); recovery
-- never trusts it alone. Sequence number 0 is a stream
-- that someone owns and that has no entry yet.
CREATE TABLE tga.heads (
    stream          text COLLATE "C" PRIMARY KEY CHECK (length(stream) <= 255),
    sequence_number bigint NOT NULL,
    entry_digest    bytea NOT NULL,
    state           text NOT NULL,
    artifact_digest bytea,
    owner           uuid,
    waiting         text CHECK (waiting ~ '^[a-z]+$'),  -- for whom it rests; null when an executor should be driving it
    is_open         boolean NOT NULL,  -- its state can still be left
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 70);

-- What recovery looks for, oldest first: ids of streams are in the order of time.
CREATE INDEX heads_open ON tga.heads (stream) WHERE is_open AND waiting IS NULL;

-- I1: in every mode of a session, for every role but a superuser who first removes the trigger.
CREATE FUNCTION tga.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'tga.% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'insufficient_privilege', HINT = 'The ledger is never changed; append to it.';
END
$$;

CREATE FUNCTION tga.guard_head() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND NEW.stream = OLD.stream AND (
        NEW.sequence_number > OLD.sequence_number
        OR (NEW.sequence_number, NEW.entry_digest, NEW.state) = (OLD.sequence_number, OLD.entry_digest, OLD.state)
           AND NEW.artifact_digest IS NOT DISTINCT FROM OLD.artifact_digest
    ) THEN
        RETURN NEW;
    END IF;
    IF TG_OP = 'DELETE' AND OLD.sequence_number = 0 THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'tga.heads only moves forward or changes its owner: % refused', TG_OP
        USING ERRCODE = 'insufficient_privilege', HINT = 'A head follows its stream; append to it.';
END
$$;

DO $$
DECLARE
    ledger_table text;
BEGIN
    FOREACH ledger_table IN ARRAY ARRAY[
        'entries', 'artifacts', 'execution_checkpoints', 'claims', 'claim_effects', 'dispatch_attempts', 'migrations'
    ] LOOP
        EXECUTE format('CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON tga.%I
                        FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change()', ledger_table);
        EXECUTE format('ALTER TABLE tga.%I ENABLE ALWAYS TRIGGER append_only', ledger_table);
    END LOOP;
END
$$;

CREATE TRIGGER head_guard BEFORE UPDATE OR DELETE ON tga.heads
    FOR EACH ROW EXECUTE FUNCTION tga.guard_head();
ALTER TABLE tga.heads ENABLE ALWAYS TRIGGER head_guard;
CREATE TRIGGER append_only BEFORE TRUNCATE ON tga.heads
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.heads ENABLE ALWAYS TRIGGER append_only;

GRANT USAGE ON SCHEMA tga TO tga_gateway;
GRANT SELECT ON ALL TABLES IN SCHEMA tga TO tga_gateway;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tga FROM PUBLIC;
