-- When the next run of these programs is ready: milliseconds from now, null where none will be by itself. A gateway
-- with waiting workers looks again then: at runs whose pause is not over yet, whoever recorded it, and at runs that a
-- gateway held and then did not lease.
CREATE FUNCTION tga.next_ready_ms(of_tenant text, of_procedures text[], of_programs text[]) RETURNS bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    RETURN (
        SELECT greatest(0, ceil(1000 * extract(epoch FROM min(r.due_at) - statement_timestamp())))::bigint
          FROM unnest(of_procedures, of_programs) AS w(procedure, program)
         CROSS JOIN LATERAL (
               SELECT o.due_at FROM runs o
                WHERE o.tenant = of_tenant AND o.procedure = w.procedure AND o.program = w.program
                  AND o.state = 'SCHEDULED' AND o.due_at > statement_timestamp()
                ORDER BY o.due_at LIMIT 1) AS r);
END
$$;

REVOKE ALL ON FUNCTION tga.next_ready_ms FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.next_ready_ms TO tga_gateway;
