-- Transitions are judged before bindings. A decision that names its request and arrives in EXECUTING was refused for
-- its binding (the artifact before it is the tool call by then), though what is wrong with it is that it comes too late.
--
-- The order is that of ARCHITECTURE.md section 6, app/core/chain.py and the vectors: schema, sequence, chain and digest,
-- transition, then what an artifact binds to; expiry last. Only two rules of the append function of 0009 change places,
-- so they are moved in its text instead of writing all of it down once more.
DO $$
DECLARE
    definition text := pg_get_functiondef('tga.append'::regproc);
    bindings   integer := strpos(definition, 'WHEN e.body ->> g_id_field[e.plan] IS DISTINCT FROM e.id');
    transition integer := strpos(definition, 'WHEN e.from_state IS DISTINCT FROM CASE');
    expiry     integer := strpos(definition, '-- A waiting request''s time');
BEGIN
    IF NOT (0 < bindings AND bindings < transition AND transition < expiry) THEN
        RAISE EXCEPTION 'the append function is not that of 0009';
    END IF;
    EXECUTE left(definition, bindings - 1)
            || substr(definition, transition, expiry - transition)
            || substr(definition, bindings, transition - bindings)
            || substr(definition, expiry);
END
$$;
