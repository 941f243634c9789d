-- Who may call: tenants, and the API keys of principals. Not part of the ledger: no stream, no chain. Still, what has
-- been given is only ever revoked, never rewritten.

CREATE TABLE tga.tenants (
    -- Without the slash that separates a tenant from its server in a qualified name.
    tenant     text COLLATE "C" PRIMARY KEY CHECK (tenant ~ '^[!-~]{1,128}$' AND tenant !~ '/|^\.\.?$'),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO tga.tenants (tenant) VALUES ('default');

-- The secret itself is nowhere. It has 256 bits of chance, so nobody finds it from its SHA-256, and a slow hash, which
-- is there to protect what people choose and remember, would add nothing but time to every call.
CREATE TABLE tga.api_keys (
    key_id        text COLLATE "C" PRIMARY KEY CHECK (key_id ~ '^[0-9a-f]{16}$'),
    secret_sha256 bytea NOT NULL CHECK (octet_length(secret_sha256) = 32),
    name          text COLLATE "C" NOT NULL CHECK (name ~ '^[!-~]([ -~]{0,126}[!-~])?$'),  -- a label, for people
    principal_id  text COLLATE "C" NOT NULL CHECK (principal_id ~ '^[!-~]{1,128}$'),       -- the identity
    tenant        text COLLATE "C" NOT NULL REFERENCES tga.tenants,
    roles         text[] NOT NULL CHECK (
        cardinality(roles) BETWEEN 1 AND 6
        AND roles <@ ARRAY['agent', 'supervisor', 'operator', 'auditor', 'worker', 'admin']
    ),
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_by    text COLLATE "C" NOT NULL CHECK (created_by ~ '^[!-~]{1,128}$'),
    expires_at    timestamptz,
    revoked_at    timestamptz
);

-- A revoked key stays revoked, and a key never becomes another one's or gets more roles: make a new one.
CREATE FUNCTION tga.guard_api_key() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, tga, pg_temp AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.revoked_at IS NULL AND NEW.revoked_at IS NOT NULL
       AND (to_jsonb(NEW) - 'revoked_at') = (to_jsonb(OLD) - 'revoked_at') THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'tga.api_keys: a key is only ever revoked, once: % refused', TG_OP
        USING ERRCODE = 'insufficient_privilege', HINT = 'Revoke the key and make a new one.';
END
$$;

-- On the table and not in the functions, so that a revocation by hand is heard too.
CREATE FUNCTION tga.announce_api_key() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, tga, pg_temp AS $$
BEGIN
    PERFORM pg_notify('tga_access', NEW.key_id);
    RETURN NULL;
END
$$;

CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON tga.tenants
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.tenants ENABLE ALWAYS TRIGGER append_only;
CREATE TRIGGER append_only BEFORE TRUNCATE ON tga.api_keys
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.api_keys ENABLE ALWAYS TRIGGER append_only;
CREATE TRIGGER key_guard BEFORE UPDATE OR DELETE ON tga.api_keys
    FOR EACH ROW EXECUTE FUNCTION tga.guard_api_key();
ALTER TABLE tga.api_keys ENABLE ALWAYS TRIGGER key_guard;
CREATE TRIGGER announced AFTER INSERT OR UPDATE ON tga.api_keys
    FOR EACH ROW EXECUTE FUNCTION tga.announce_api_key();
ALTER TABLE tga.api_keys ENABLE ALWAYS TRIGGER announced;

-- Whether it was new.
CREATE FUNCTION tga.create_tenant(new_tenant text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    INSERT INTO tenants (tenant) VALUES (new_tenant) ON CONFLICT DO NOTHING;
    RETURN FOUND;
END
$$;

-- The id of the new key, or null when there is no such tenant. Life is counted from now, by this server's clock.
CREATE FUNCTION tga.create_api_key(
    new_key_id text, new_secret_sha256 bytea, new_name text, new_principal_id text, of_tenant text, new_roles text[],
    new_created_by text, life_s bigint
) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    born timestamptz := clock_timestamp();
    created text;
BEGIN
    PERFORM prepare_transaction(5000);
    IF life_s <= 0 THEN
        RAISE EXCEPTION 'a key lives for at least a second' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO api_keys (key_id, secret_sha256, name, principal_id, tenant, roles, created_at, created_by, expires_at)
    SELECT new_key_id, new_secret_sha256, new_name, new_principal_id, t.tenant, new_roles, born, new_created_by,
           born + make_interval(secs => life_s)
      FROM tenants t WHERE t.tenant = of_tenant
    RETURNING key_id INTO created;
    RETURN created;
END
$$;

-- Whether it was revoked now; false when it had been before, null when there is no such key.
CREATE FUNCTION tga.revoke_api_key(revoked_key_id text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    UPDATE api_keys k SET revoked_at = clock_timestamp() WHERE k.key_id = revoked_key_id AND k.revoked_at IS NULL;
    IF FOUND THEN
        RETURN true;
    END IF;
    RETURN (SELECT false FROM api_keys k WHERE k.key_id = revoked_key_id);
END
$$;

GRANT SELECT ON tga.tenants, tga.api_keys TO tga_gateway;
REVOKE ALL ON FUNCTION
    tga.guard_api_key, tga.announce_api_key, tga.create_tenant, tga.create_api_key, tga.revoke_api_key FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.create_tenant, tga.create_api_key, tga.revoke_api_key TO tga_gateway;
