-- Before the first migration, and harmless ever after: who owns the ledger, who may use it, where migrations are noted.

-- Roles belong to the whole server: another database's migration may be making them at this moment.
DO $$
BEGIN
    BEGIN
        CREATE ROLE tga_owner NOLOGIN;  -- an owner could disable the triggers, so nobody can log in as it
    EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
    END;
    BEGIN
        CREATE ROLE tga_gateway LOGIN;
    EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
    END;
    IF NOT pg_has_role(current_user, 'tga_owner', 'MEMBER') THEN
        EXECUTE format('GRANT tga_owner, tga_gateway TO %I', current_user);
    END IF;
    IF to_regnamespace('tga') IS NULL THEN
        CREATE SCHEMA tga AUTHORIZATION tga_owner;
    END IF;
END
$$;

SET LOCAL ROLE tga_owner;

CREATE TABLE IF NOT EXISTS tga.migrations (
    version    integer PRIMARY KEY,
    name       text NOT NULL,
    sha256     text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
