-- The ledger: streams of hash-chained entries, the artifacts they commit to, and what protects them.
--
--   stored as                what a person reads (a view)          holds
--   heads                    heads, claims, claim_effects          a row a stream: name, birth, claim, where it stands
--   links                    entries                               a row an entry: fields from which its bytes follow
--   payloads                 artifacts                             a row a plan: the artifacts of its entries
--   execution_checkpoints, dispatch_attempts, sealed               rare rows about a stream
--   in_work, at_rest                                               which streams recovery, expiry and lists look for
--
-- A stream has a name (`kind:id`) and, in the wide tables, a number: names have up to 255 characters, and would stand
-- in every index. docs/adr/0029-a-lean-ledger.md has the figures behind each table.

CREATE SEQUENCE tga.stream_numbers;

-- One row a stream. Its name, what its birth says of it and its claim never change; the rest is a projection that can
-- be rebuilt from the entries (but for owner and waiting, which are of the moment), and recovery never trusts it alone.
-- Sequence number 0 is a stream that someone owns and that has no entry yet.
--
-- No index is on a column that changes: an update stays on its page and touches no index (HOT). What is looked for by
-- state stands in `in_work` and `at_rest`. The tables that every append writes have no CHECK: PostgreSQL reads the text
-- of each anew for each statement, which took a tenth of a lone append; what they would say the append function has
-- seen to.
CREATE TABLE tga.heads (
    stream_no       bigint PRIMARY KEY DEFAULT nextval('tga.stream_numbers'),
    stream          varchar(255) COLLATE "C" NOT NULL UNIQUE,
    tenant          text COLLATE "C",
    principal_id    text COLLATE "C",
    subject         text COLLATE "C",
    name            text COLLATE "C",
    expires_at      timestamptz,
    -- I2: the claim of {subject, name, idempotency_key}, by this stream, for ever.
    idempotency_key text COLLATE "C",
    payload_digest  bytea,
    -- From here on what changes.
    effect_digest   bytea,                 -- I2: what the claim waited for, once
    sequence_number bigint NOT NULL,
    entry_digest    bytea NOT NULL,
    artifact_digest bytea,
    state           text NOT NULL,
    is_open         boolean NOT NULL,      -- its state can still be left
    waiting         text,                  -- for whom it rests; null when an executor should be driving it
    owner           uuid,
    lease_until     timestamptz,           -- of the owner, where the kind's owners live by leases
    updated_at      timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 80);

CREATE UNIQUE INDEX heads_claim ON tga.heads (subject, name, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX heads_tenant ON tga.heads (tenant, stream);

-- Open, and waiting for nobody: recovery's work. A row comes with the entry that puts a stream to work; one that has
-- ended is swept away by whoever looks for work next, so that the end of a call writes nothing here.
CREATE TABLE tga.in_work (
    kind      text COLLATE "C" NOT NULL,
    stream_no bigint NOT NULL,
    PRIMARY KEY (kind, stream_no)
);

-- Waiting for someone, or ended otherwise than its kind usually ends. Most streams never have a row here.
CREATE TABLE tga.at_rest (
    stream_no  bigint PRIMARY KEY,
    stream     text COLLATE "C" NOT NULL,
    tenant     text COLLATE "C",
    state      text COLLATE "C" NOT NULL,
    waiting    text COLLATE "C" CHECK (waiting ~ '^[a-z]+$'),
    expires_at timestamptz
);
CREATE INDEX at_rest_in_state ON tga.at_rest (tenant, state, stream);
CREATE INDEX at_rest_waiting ON tga.at_rest (tenant, waiting, stream) WHERE waiting IS NOT NULL;
CREATE INDEX at_rest_expiry ON tga.at_rest (expires_at) WHERE waiting IS NOT NULL;

-- One row an entry. The stored truth is the RFC 8785 bytes of the entry; here they stand as the fields from which the
-- append function has written exactly these bytes and hashed them, or, for an entry of another form, as they are.
CREATE TABLE tga.links (
    stream_no         bigint NOT NULL,
    sequence_number   bigint NOT NULL,
    xid               xid8 NOT NULL DEFAULT pg_current_xact_id(),  -- commit order, for the tree and for followers
    place             smallint NOT NULL,                           -- among the entries of its plan
    places            smallint NOT NULL,                           -- how many these are
    executor_id       uuid NOT NULL,
    entry_digest      bytea NOT NULL,
    prev_entry_digest bytea NOT NULL,
    artifact_digest   bytea NOT NULL,
    recorded_at       text NOT NULL,
    artifact_type     text NOT NULL,
    from_state        text NOT NULL,
    to_state          text NOT NULL,
    verbatim          bytea NOT NULL DEFAULT '',                   -- the bytes, where they do not follow
    PRIMARY KEY (stream_no, sequence_number)
);
-- The order of commits: the first entry of each plan leads to the others.
CREATE INDEX links_by_commit ON tga.links (xid, stream_no, sequence_number) WHERE place = 1;

-- One row a plan, under the number of its first entry: apart from the links that commit to them, so that payloads can
-- be erased while every digest stands; together, so that what they have in common is compressed.
CREATE TABLE tga.payloads (
    stream_no       bigint NOT NULL,
    sequence_number bigint NOT NULL,
    artifacts       bytea[] NOT NULL,
    PRIMARY KEY (stream_no, sequence_number)
);

CREATE TABLE tga.execution_checkpoints (
    stream            text COLLATE "C" NOT NULL,
    sequence_number   bigint NOT NULL,
    checkpoint_state  bytea NOT NULL,
    checkpoint_digest bytea NOT NULL CHECK (octet_length(checkpoint_digest) = 32),
    created_at        text NOT NULL,
    PRIMARY KEY (stream, sequence_number)
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

-- Secret arguments, outside the ledger and only sealed. The values go when the stream is finished.
CREATE TABLE tga.sealed (
    stream        text COLLATE "C" PRIMARY KEY,
    sealed_salt   bytea NOT NULL CHECK (octet_length(sealed_salt) <= 65536),
    sealed_values bytea CHECK (octet_length(sealed_values) <= 1048576)
);

-- For people and programs that read. A row whose head is missing has no stream, and is shown all the same.

-- `entry` is what was hashed, byte for byte: sha256(entry) = entry_digest, unless someone has changed a row.
CREATE VIEW tga.entries AS
SELECT h.stream, l.sequence_number,
       CASE WHEN l.verbatim <> '' THEN l.verbatim
            ELSE convert_to(format(k.entry_form, encode(l.artifact_digest, 'hex'), l.artifact_type, l.executor_id,
                                   l.from_state, encode(l.prev_entry_digest, 'hex'), l.recorded_at, l.sequence_number,
                                   l.to_state, substr(h.stream, length(k.kind) + 2)), 'UTF8') END AS entry,
       l.entry_digest, l.xid, l.stream_no, l.place, l.artifact_type, l.from_state, l.to_state, l.recorded_at
  FROM tga.links l
  LEFT JOIN tga.heads h ON h.stream_no = l.stream_no
  LEFT JOIN tga.stream_kinds k ON k.kind = split_part(h.stream, ':', 1);

CREATE VIEW tga.artifacts AS
SELECT h.stream, p.sequence_number + i - 1 AS sequence_number, p.artifacts[i] AS artifact, p.stream_no
  FROM tga.payloads p
 CROSS JOIN LATERAL generate_subscripts(p.artifacts, 1) AS i
  LEFT JOIN tga.heads h ON h.stream_no = p.stream_no;

-- Entries with their artifacts, for those who read both; null where a payload is gone. Ask by `stream_no`, which alone
-- leads along an index in the order of the entries.
CREATE VIEW tga.records AS
SELECT e.*, p.artifacts[e.place] AS artifact
  FROM tga.entries e
  LEFT JOIN tga.payloads p ON p.stream_no = e.stream_no AND p.sequence_number = e.sequence_number - e.place + 1;

CREATE VIEW tga.claims AS
SELECT h.subject AS server_id, h.name AS tool_name, h.idempotency_key, h.stream, h.payload_digest
  FROM tga.heads h WHERE h.idempotency_key IS NOT NULL;

CREATE VIEW tga.claim_effects AS
SELECT h.stream, h.effect_digest AS artifact_digest FROM tga.heads h WHERE h.effect_digest IS NOT NULL;

-- I1: in every mode of a session, for every role but a superuser who first removes the trigger.
CREATE FUNCTION tga.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'tga.% is append-only: % refused', TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'insufficient_privilege', HINT = 'The ledger is never changed; append to it.';
END
$$;

CREATE FUNCTION tga.refuse_head() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'tga.heads only moves forward or changes its owner: % refused', TG_OP
        USING ERRCODE = 'insufficient_privilege', HINT = 'A head follows its stream; append to it.';
END
$$;

DO $$
DECLARE
    ledger_table text;
BEGIN
    FOREACH ledger_table IN ARRAY ARRAY[
        'links', 'payloads', 'execution_checkpoints', 'dispatch_attempts', 'migrations'
    ] LOOP
        EXECUTE format('CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON tga.%I
                        FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change()', ledger_table);
        EXECUTE format('ALTER TABLE tga.%I ENABLE ALWAYS TRIGGER append_only', ledger_table);
    END LOOP;
END
$$;

-- What a birth says stays as it is, and so does a claim (I2): no update may so much as name these columns.
CREATE TRIGGER birth_guard BEFORE UPDATE OF
    stream_no, stream, tenant, principal_id, subject, name, expires_at, idempotency_key, payload_digest
    ON tga.heads FOR EACH ROW EXECUTE FUNCTION tga.refuse_head();
ALTER TABLE tga.heads ENABLE ALWAYS TRIGGER birth_guard;
-- The rest follows the entries, forward only, and a claim has one effect. Owner and waiting are free. A condition and
-- not a function's body: it is part of the update.
CREATE TRIGGER head_guard BEFORE UPDATE OF sequence_number, entry_digest, artifact_digest, state, is_open, effect_digest
    ON tga.heads FOR EACH ROW
    WHEN (NEW.sequence_number <= OLD.sequence_number OR NEW.effect_digest IS DISTINCT FROM OLD.effect_digest
          AND OLD.effect_digest IS NOT NULL)
    EXECUTE FUNCTION tga.refuse_head();
ALTER TABLE tga.heads ENABLE ALWAYS TRIGGER head_guard;
CREATE TRIGGER head_stays BEFORE DELETE ON tga.heads FOR EACH ROW
    WHEN (OLD.sequence_number > 0) EXECUTE FUNCTION tga.refuse_head();
ALTER TABLE tga.heads ENABLE ALWAYS TRIGGER head_stays;
CREATE TRIGGER append_only BEFORE TRUNCATE ON tga.heads
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.heads ENABLE ALWAYS TRIGGER append_only;

GRANT USAGE ON SCHEMA tga TO tga_gateway;
GRANT SELECT ON ALL TABLES IN SCHEMA tga TO tga_gateway;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tga FROM PUBLIC;
