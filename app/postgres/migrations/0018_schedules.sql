-- A schedule is being made, changed or removed: noted before it is recorded, and forgotten when its row follows the
-- record. What a gateway leaves here when it dies, another one finishes, and need not look through every tenant for it.
CREATE TABLE tga.schedule_changes (
    tenant   text COLLATE "C" NOT NULL,
    name     text COLLATE "C" NOT NULL,
    begun_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (tenant, name)
);

-- When it was begun, by which its end names it.
CREATE FUNCTION tga.begin_schedule_change(of_tenant text, of_name text) RETURNS timestamptz
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    begun timestamptz;
BEGIN
    PERFORM prepare_transaction(5000);
    INSERT INTO schedule_changes (tenant, name) VALUES (of_tenant, of_name)
        ON CONFLICT (tenant, name) DO UPDATE SET begun_at = clock_timestamp()
    RETURNING begun_at INTO begun;
    RETURN begun;
END
$$;

-- The row follows the record. A change that was begun since is not over with this one.
CREATE FUNCTION tga.end_schedule_change(of_tenant text, of_name text, begun timestamptz) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    DELETE FROM schedule_changes c WHERE c.tenant = of_tenant AND c.name = of_name AND c.begun_at = begun;
END
$$;

GRANT SELECT ON tga.schedule_changes TO tga_gateway;
REVOKE ALL ON FUNCTION tga.begin_schedule_change, tga.end_schedule_change FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.begin_schedule_change, tga.end_schedule_change TO tga_gateway;
