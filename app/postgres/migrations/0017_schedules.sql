-- Schedules start runs at their times. What a schedule is stands on its tenant's system stream; a row here says when
-- it is due next, and is made from the record again where it is missing.

INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id) VALUES
    ('system', 'schedule',         'tga/v1/schedule'),
    ('system', 'schedule_removal', 'tga/v1/schedule_removal');
INSERT INTO tga.transitions (kind, from_state, artifact_type, to_state, is_birth)
SELECT 'system', 'OPEN', artifact_type, 'OPEN', is_birth
  FROM unnest(ARRAY['schedule', 'schedule_removal']) AS artifact_type, unnest(ARRAY[true, false]) AS is_birth;

CREATE TABLE tga.schedules (
    tenant          text COLLATE "C" NOT NULL,
    name            text COLLATE "C" NOT NULL,
    sequence_number bigint NOT NULL,           -- of the entry of the system stream that says what it is
    procedure       text COLLATE "C" NOT NULL,
    version         text COLLATE "C",
    spec            jsonb NOT NULL,
    missed          text COLLATE "C" NOT NULL,
    principal_id    text COLLATE "C" NOT NULL,  -- who made it, and as whom its runs are started
    next_at         timestamptz,                -- null: it is due never again
    held_until      timestamptz,                -- a gateway has taken it, and no other does until then
    last_at         timestamptz,                -- the last time for which a run was to be started; what became of it
    last_run_id     text COLLATE "C",
    last_error      text,
    PRIMARY KEY (tenant, name)
) WITH (fillfactor = 70);
CREATE INDEX schedules_due ON tga.schedules (next_at) WHERE next_at IS NOT NULL;

-- The row follows the record: one that was made from a later entry stays.
CREATE FUNCTION tga.put_schedule(
    of_tenant text, new_name text, new_sequence_number bigint, new_procedure text, new_version text, new_spec jsonb,
    new_missed text, new_principal_id text, new_next_at timestamptz
) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    INSERT INTO schedules AS s (tenant, name, sequence_number, procedure, version, spec, missed, principal_id, next_at)
    VALUES (of_tenant, new_name, new_sequence_number, new_procedure, new_version, new_spec, new_missed,
            new_principal_id, new_next_at)
        ON CONFLICT (tenant, name) DO UPDATE
       SET sequence_number = excluded.sequence_number, procedure = excluded.procedure, version = excluded.version,
           spec = excluded.spec, missed = excluded.missed, principal_id = excluded.principal_id,
           next_at = excluded.next_at, held_until = NULL
     WHERE s.sequence_number < excluded.sequence_number;
END
$$;

CREATE FUNCTION tga.drop_schedule(of_tenant text, old_name text, last_sequence_number bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    DELETE FROM schedules s
     WHERE s.tenant = of_tenant AND s.name = old_name AND s.sequence_number <= last_sequence_number;
END
$$;

-- Those that are due and that nobody else has, the longest due first; nobody else gets them for `hold_ms`.
CREATE FUNCTION tga.take_schedules(at_most integer, hold_ms bigint)
RETURNS TABLE (tenant text, name text, sequence_number bigint, next_at timestamptz, taken_at timestamptz)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    RETURN QUERY
    UPDATE schedules s SET held_until = statement_timestamp() + hold_ms * interval '1 millisecond'
      FROM (SELECT d.tenant, d.name FROM schedules d
             WHERE d.next_at <= statement_timestamp()
               AND (d.held_until IS NULL OR d.held_until <= statement_timestamp())
             ORDER BY d.next_at LIMIT at_most FOR UPDATE SKIP LOCKED) AS due
     WHERE s.tenant = due.tenant AND s.name = due.name
    RETURNING s.tenant, s.name, s.sequence_number, s.next_at, statement_timestamp();
END
$$;

-- Whether the row was still as it had been taken: neither made anew nor settled by another gateway.
CREATE FUNCTION tga.settle_schedule(
    of_tenant text, of_name text, of_sequence_number bigint, was_next_at timestamptz, new_next_at timestamptz,
    new_last_at timestamptz, new_last_run_id text, new_last_error text
) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    UPDATE schedules s
       SET next_at = new_next_at, held_until = NULL, last_at = coalesce(new_last_at, s.last_at),
           last_run_id = CASE WHEN new_last_at IS NULL THEN s.last_run_id ELSE new_last_run_id END,
           last_error = CASE WHEN new_last_at IS NULL THEN s.last_error ELSE new_last_error END
     WHERE s.tenant = of_tenant AND s.name = of_name AND s.sequence_number = of_sequence_number
       AND s.next_at = was_next_at;
    RETURN FOUND;
END
$$;

GRANT SELECT ON tga.schedules TO tga_gateway;
REVOKE ALL ON FUNCTION tga.put_schedule, tga.drop_schedule, tga.take_schedules, tga.settle_schedule FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.put_schedule, tga.drop_schedule, tga.take_schedules, tga.settle_schedule TO tga_gateway;
