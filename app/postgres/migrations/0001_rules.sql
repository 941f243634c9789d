-- The rules of every kind of stream, as data. Nothing in these migrations knows what a trace is: the functions read the
-- rows of these three tables, and a new kind of stream is an INSERT, not a change of code.

-- How an entry of a kind is written, as a form for format(). The fields are those that every entry of every kind has
-- (and the one that names its stream); in the order of RFC 8785, which for ASCII is that of their bytes.
--
--   %1$s artifact_digest   %4$s from_state          %7$s sequence_number
--   %2$s artifact_type     %5$s prev_entry_digest   %8$s to_state
--   %3$s executor_id       %6$s recorded_at         %9$s the stream's id
CREATE FUNCTION tga.entry_form(id_field text, schema_id text, schema_version text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp
AS $$
    SELECT '{' || string_agg(to_json(f.field)::text || ':' || f.value, ',' ORDER BY f.field COLLATE "C") || '}'
      FROM (VALUES ('artifact_digest', '"%1$s"'), ('artifact_type', '"%2$s"'), ('executor_id', '"%3$s"'),
                   ('from_state', '"%4$s"'), ('prev_entry_digest', '"%5$s"'), ('recorded_at', '"%6$s"'),
                   ('sequence_number', '%7$s'), ('to_state', '"%8$s"'), (id_field, '"%9$s"'),
                   ('schema_id', replace(to_json(schema_id)::text, '%', '%%')),
                   ('schema_version', replace(to_json(schema_version)::text, '%', '%%'))) AS f(field, value)
$$;

-- Paths lead to a text in a stream's first artifact; null: this kind has none.
CREATE TABLE tga.stream_kinds (
    kind                 text COLLATE "C" PRIMARY KEY CHECK (kind ~ '^[a-z_]+$'),
    id_field             text NOT NULL CHECK (id_field ~ '^[a-z_]+$'),  -- where entries and artifacts name their stream
    entry_schema_id      text NOT NULL,
    birth_state          text NOT NULL,
    entry_schema_version text NOT NULL DEFAULT '1.0',
    entry_form           text NOT NULL
        GENERATED ALWAYS AS (tga.entry_form(id_field, entry_schema_id, entry_schema_version)) STORED,
    usual_end            text,    -- most streams end in this state; lists of the others have an index
    tenant_path          text[],  -- whose the stream is
    principal_path       text[],  -- who asked for it
    subject_path         text[],  -- what it is about: of a trace the tool server
    name_path            text[],  -- and by which name: of a trace the tool
    expiry_path          text[],  -- until when what it first waits for can be given
    -- How an executor that owns a stream is known to live: it holds a session lock on its own id; or it has appended or
    -- taken the stream within the last `lease_ms`.
    owner_life           text NOT NULL DEFAULT 'session' CHECK (owner_life IN ('session', 'lease')),
    lease_ms             integer CHECK (lease_ms > 0),
    CHECK ((owner_life = 'lease') = (lease_ms IS NOT NULL))
);

CREATE TABLE tga.artifact_rules (
    kind          text COLLATE "C" NOT NULL REFERENCES tga.stream_kinds,
    artifact_type text COLLATE "C" NOT NULL,
    schema_id     text NOT NULL,
    verdict_field text,                            -- the field that decides which state follows
    binds_field   text,                            -- the field that names the digest of the artifact before it
    settles_claim boolean NOT NULL DEFAULT false,  -- it is the effect that the stream's claim waits for
    -- It ends the wait for which the stream has an expiry: with this text at this path because the time is over, and
    -- with another only before.
    expired_path  text[],
    expired_value text,
    -- It erases: where it names the stream whose payloads go with it, and where it says what the claim of that one is.
    erases_path   text[],
    erased_claim_path text[],
    PRIMARY KEY (kind, artifact_type),
    UNIQUE (kind, schema_id),
    CHECK ((expired_path IS NULL) = (expired_value IS NULL))
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

-- What these two tables say of each kind, gathered by their triggers, because the append function looks at it for every
-- entry: for each schema of an artifact its rule, and where it leads from each state by each verdict; and the states
-- that can be left.
CREATE TABLE tga.machines (
    kind        text COLLATE "C" PRIMARY KEY,
    machine     jsonb NOT NULL,
    open_states text[] NOT NULL
);

-- All of them anew: rules are written when a kind is made, and hardly ever while it is used.
CREATE FUNCTION tga.gather_rules() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, tga, pg_temp AS $$
BEGIN
    INSERT INTO machines (kind, machine, open_states)
    SELECT r.kind,
           jsonb_object_agg(r.schema_id, jsonb_strip_nulls(jsonb_build_object(
               'artifact_type', r.artifact_type, 'verdict_field', r.verdict_field, 'binds_field', r.binds_field,
               'settles_claim', nullif(r.settles_claim, false), 'expired_path', r.expired_path::text)) || t.leads),
           ARRAY(SELECT DISTINCT o.from_state FROM transitions o WHERE o.kind = r.kind AND NOT o.is_birth ORDER BY 1)
      FROM artifact_rules r
     CROSS JOIN LATERAL (
           SELECT jsonb_build_object(
                      'births', coalesce(jsonb_object_agg(s.from_state, s.leads) FILTER (WHERE s.is_birth), '{}'),
                      'leads', coalesce(jsonb_object_agg(s.from_state, s.leads) FILTER (WHERE NOT s.is_birth), '{}'))
                  AS leads
             FROM (SELECT t.from_state, t.is_birth, jsonb_object_agg(t.verdict, t.to_state) AS leads
                     FROM transitions t WHERE t.kind = r.kind AND t.artifact_type = r.artifact_type
                    GROUP BY t.from_state, t.is_birth) AS s) AS t
     GROUP BY r.kind
        ON CONFLICT (kind) DO UPDATE SET machine = excluded.machine, open_states = excluded.open_states;
    DELETE FROM machines m WHERE NOT EXISTS (SELECT FROM artifact_rules r WHERE r.kind = m.kind);
    RETURN NULL;
END
$$;
CREATE TRIGGER gathered AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON tga.artifact_rules
    FOR EACH STATEMENT EXECUTE FUNCTION tga.gather_rules();
ALTER TABLE tga.artifact_rules ENABLE ALWAYS TRIGGER gathered;
CREATE TRIGGER gathered AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON tga.transitions
    FOR EACH STATEMENT EXECUTE FUNCTION tga.gather_rules();
ALTER TABLE tga.transitions ENABLE ALWAYS TRIGGER gathered;

-- A trace: one governed tool call. A test compares these rows with app/domain/tga/transitions.py.
INSERT INTO tga.stream_kinds
       (kind, id_field, entry_schema_id, birth_state, usual_end,
        tenant_path, principal_path, subject_path, name_path, expiry_path)
VALUES ('trace', 'trace_id', 'tga/v1/execution_log_entry', 'PENDING', 'COMPLETED',
        '{principal,tenant}', '{principal,principal_id}', '{server_id}', '{tool_name}', '{expires_at}');

INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id, verdict_field, binds_field, settles_claim) VALUES
    ('trace', 'action_request',      'tga/v1/action_request',      NULL,       NULL,                         false),
    ('trace', 'supervisor_decision', 'tga/v1/supervisor_decision', 'decision', 'action_request_digest',      false),
    ('trace', 'tool_call',           'tga/v1/tool_call',           NULL,       'supervisor_decision_digest', false),
    ('trace', 'tool_effect',         'tga/v1/tool_effect',         'outcome',  'tool_call_digest',           true);
UPDATE tga.artifact_rules SET expired_path = '{decided_by,type}', expired_value = 'expiry'
 WHERE kind = 'trace' AND artifact_type = 'supervisor_decision';

INSERT INTO tga.transitions (kind, from_state, artifact_type, verdict, to_state, is_birth) VALUES
    ('trace', 'PENDING',    'action_request',      '',        'PENDING',    true),
    ('trace', 'PENDING',    'supervisor_decision', 'APPROVE', 'AUTHORIZED', false),
    ('trace', 'PENDING',    'supervisor_decision', 'DENY',    'DENIED',     false),
    ('trace', 'AUTHORIZED', 'tool_call',           '',        'EXECUTING',  false),
    ('trace', 'EXECUTING',  'tool_effect',         'SUCCESS', 'COMPLETED',  false),
    ('trace', 'EXECUTING',  'tool_effect',         'FAILURE', 'FAILED',     false);

-- A system stream: what the gateway itself does and relies on, one for each tenant; it never ends.
INSERT INTO tga.stream_kinds (kind, id_field, entry_schema_id, birth_state, tenant_path)
VALUES ('system', 'system_id', 'tga/v1/system_log_entry', 'OPEN', '{system_id}');
INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id, erases_path, erased_claim_path) VALUES
    ('system', 'tool_pin',    'tga/v1/tool_pin',    NULL,              NULL),
    ('system', 'signing_key', 'tga/v1/signing_key', NULL,              NULL),
    ('system', 'policy_set',  'tga/v1/policy_set',  NULL,              NULL),
    ('system', 'erasure',     'tga/v1/erasure',     '{erased_stream}', '{claim}');
INSERT INTO tga.transitions (kind, from_state, artifact_type, to_state, is_birth)
SELECT kind, 'OPEN', artifact_type, 'OPEN', is_birth
  FROM tga.artifact_rules, unnest(ARRAY[true, false]) AS is_birth WHERE kind = 'system';
