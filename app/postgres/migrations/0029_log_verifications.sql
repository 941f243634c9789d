-- Verifications of the whole log: how far each has come and what it found, for every gateway to read. Nothing is
-- decided by these rows, and whoever owns the database can change them: they say what a gateway saw, and prove nothing.
--
--   attempt     raised by each gateway that takes a verification over; who holds an older one writes nothing more
--   beat_at     when the gateway that works on it last wrote; long ago means that it is gone
--   told        the document that clients get, as JSON text: what was found may hold what jsonb refuses
CREATE TABLE tga.log_verifications (
    verification_id text COLLATE "C" PRIMARY KEY,
    tenant          text COLLATE "C" NOT NULL,
    begun_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at        timestamptz,                     -- null while it runs
    is_conclusive   boolean NOT NULL DEFAULT false,  -- it ended sound or wrong
    is_to_stop      boolean NOT NULL DEFAULT false,
    attempt         integer NOT NULL DEFAULT 1,
    beat_at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    told            text NOT NULL
);
CREATE UNIQUE INDEX log_verifications_running ON tga.log_verifications (tenant) WHERE ended_at IS NULL;
CREATE INDEX log_verifications_listed ON tga.log_verifications (tenant, begun_at, verification_id);
CREATE INDEX log_verifications_conclusive ON tga.log_verifications (ended_at) WHERE is_conclusive;

-- False while another one of the tenant runs. Forgets what ended before the last `kept` of the tenant began.
CREATE FUNCTION tga.begin_log_verification(id text, of_tenant text, document text, kept integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    INSERT INTO log_verifications (verification_id, tenant, told) VALUES (id, of_tenant, document)
        ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM log_verifications v
     WHERE v.tenant = of_tenant AND v.ended_at IS NOT NULL
       AND v.verification_id NOT IN (SELECT w.verification_id FROM log_verifications w WHERE w.tenant = of_tenant
                                      ORDER BY w.begun_at DESC, w.verification_id DESC LIMIT kept);
    RETURN true;
END
$$;

-- The attempt of whoever takes over what its gateway has not written to for so long; null when there is none to take.
CREATE FUNCTION tga.take_log_verification(id text, silent_ms integer) RETURNS integer
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    mine integer;
BEGIN
    PERFORM prepare_transaction(5000);
    UPDATE log_verifications v SET attempt = v.attempt + 1, beat_at = clock_timestamp()
     WHERE v.verification_id = id AND v.ended_at IS NULL
       AND v.beat_at <= clock_timestamp() - silent_ms * interval '1 millisecond'
    RETURNING v.attempt INTO mine;
    RETURN mine;
END
$$;

-- Whether somebody wants it stopped; null when it has ended, or another gateway has taken it over.
CREATE FUNCTION tga.save_log_verification(
    id text, of_attempt integer, document text, is_over boolean, concludes boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    stopping boolean;
BEGIN
    PERFORM prepare_transaction(5000);
    UPDATE log_verifications v
       SET told = document, beat_at = clock_timestamp(), is_conclusive = concludes,
           ended_at = CASE WHEN is_over THEN clock_timestamp() END
     WHERE v.verification_id = id AND v.attempt = of_attempt AND v.ended_at IS NULL
    RETURNING v.is_to_stop INTO stopping;
    RETURN stopping;
END
$$;

CREATE FUNCTION tga.stop_log_verification(id text, of_tenant text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    UPDATE log_verifications v SET is_to_stop = true
     WHERE v.verification_id = id AND v.tenant = of_tenant AND v.ended_at IS NULL;
END
$$;

GRANT SELECT ON tga.log_verifications TO tga_gateway;
REVOKE ALL ON FUNCTION tga.begin_log_verification, tga.take_log_verification, tga.save_log_verification,
    tga.stop_log_verification FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.begin_log_verification, tga.take_log_verification, tga.save_log_verification,
    tga.stop_log_verification TO tga_gateway;
