-- What schema tga is made of, one row an object: its kind, its name, and its facts. `of` names the table it belongs to.
--
-- The same schema gives the same rows on every PostgreSQL from 14 on: bodies are digests; expressions are as PostgreSQL
-- writes them with nothing but pg_catalog on the search path (expressions.py settles the rest); columns that newer
-- versions gave to their catalogs are read by way of to_jsonb, which knows no missing ones.
--
-- Left out: what only makes things faster or slower (statistics, storage, costs), and what the catalog holds twice (row
-- types of tables, array types, the constraints by which 18 says NOT NULL, as every version's columns do).
WITH ours AS (
    SELECT c.* FROM pg_class c WHERE c.relnamespace = to_regnamespace('tga')
), acls AS (
    SELECT 'pg_class'::regclass AS catalog, c.oid AS object, 0 AS part, c.relowner AS owner,
           coalesce(c.relacl, acldefault(CASE c.relkind WHEN 'S' THEN 's' ELSE 'r' END::"char", c.relowner)) AS acl
      FROM ours c WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')
    UNION ALL
    SELECT 'pg_attribute', a.attrelid, a.attnum, c.relowner, a.attacl
      FROM pg_attribute a JOIN ours c ON c.oid = a.attrelid WHERE a.attacl IS NOT NULL
    UNION ALL
    SELECT 'pg_proc', p.oid, 0, p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
      FROM pg_proc p WHERE p.pronamespace = to_regnamespace('tga')
    UNION ALL
    SELECT 'pg_type', t.oid, 0, t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
      FROM pg_type t WHERE t.typnamespace = to_regnamespace('tga')
    UNION ALL
    SELECT 'pg_namespace', n.oid, 0, n.nspowner, coalesce(n.nspacl, acldefault('n', n.nspowner))
      FROM pg_namespace n WHERE n.nspname = 'tga'
), granted AS (
    SELECT g.catalog, g.object, g.part, jsonb_agg(DISTINCT g.entry) AS list
      FROM (SELECT a.catalog, a.object, a.part,
                   concat(x.privilege_type, ' TO ',
                          CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_get_userbyid(x.grantee) END,
                          CASE WHEN x.is_grantable THEN ' WITH GRANT OPTION' END) AS entry
              FROM acls a CROSS JOIN LATERAL aclexplode(a.acl) AS x
             WHERE NOT (x.privilege_type = 'MAINTAIN' AND x.grantee = a.owner)) AS g  -- 17 has it, every owner has it
     GROUP BY g.catalog, g.object, g.part
)

SELECT 'schema' AS kind, n.nspname::text AS name, jsonb_build_object(
           'owner', pg_get_userbyid(n.nspowner), 'grants', g.list) AS facts
  FROM pg_namespace n LEFT JOIN granted g ON g.catalog = 'pg_namespace'::regclass AND g.object = n.oid
 WHERE n.nspname = 'tga'

UNION ALL
SELECT CASE WHEN c.relkind IN ('v', 'm') THEN 'view' WHEN c.relkind = 'S' THEN 'sequence' ELSE 'table' END, c.relname,
       jsonb_build_object(
           'relation', CASE c.relkind WHEN 'r' THEN 'table' WHEN 'p' THEN 'partitioned table' WHEN 'v' THEN 'view'
                                      WHEN 'm' THEN 'materialized view' WHEN 'f' THEN 'foreign table'
                                      ELSE 'sequence' END,
           'owner', pg_get_userbyid(c.relowner), 'grants', g.list,
           'persistence', CASE c.relpersistence WHEN 'p' THEN 'logged' WHEN 'u' THEN 'unlogged' ELSE 'temporary' END,
           'row security', CASE WHEN c.relforcerowsecurity THEN 'forced' WHEN c.relrowsecurity THEN 'on' ELSE 'off' END,
           'options', (SELECT jsonb_agg(o ORDER BY o COLLATE "C") FROM unnest(c.reloptions) AS o),
           'parents', (SELECT jsonb_agg(i.inhparent::regclass::text) FROM pg_inherits i WHERE i.inhrelid = c.oid),
           'children', (SELECT jsonb_agg(i.inhrelid::regclass::text) FROM pg_inherits i WHERE i.inhparent = c.oid),
           'query', CASE WHEN c.relkind IN ('v', 'm') THEN pg_get_viewdef(c.oid) END,
           -- Which columns are qualified in a view's query depends on the version; this says whose they are.
           'reads', CASE WHEN c.relkind IN ('v', 'm') THEN (
                        SELECT jsonb_agg(DISTINCT pg_describe_object(d.refclassid, d.refobjid, d.refobjsubid))
                          FROM pg_rewrite r JOIN pg_depend d ON d.classid = 'pg_rewrite'::regclass AND d.objid = r.oid
                         WHERE r.ev_class = c.oid AND d.deptype = 'n' AND d.refobjid <> c.oid) END)
  FROM ours c LEFT JOIN granted g ON g.catalog = 'pg_class'::regclass AND g.object = c.oid
 WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S')

UNION ALL
SELECT 'column', concat(c.relname, '.', a.attname), jsonb_build_object(
           'of', c.relname, 'type', format_type(a.atttypid, a.atttypmod), 'not null', a.attnotnull,
           'default', pg_get_expr(d.adbin, d.adrelid),
           'identity', nullif(a.attidentity, ''), 'generated', nullif(a.attgenerated, ''),
           'collation', l.collname, 'grants', g.list,
           'position', CASE WHEN c.relkind IN ('c', 'v', 'm') THEN a.attnum END)
  FROM ours c
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
  LEFT JOIN pg_collation l ON l.oid = a.attcollation
  LEFT JOIN granted g ON g.catalog = 'pg_attribute'::regclass AND g.object = c.oid AND g.part = a.attnum
 WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f', 'c')

UNION ALL
SELECT 'constraint', concat(c.relname, '.', k.conname), jsonb_build_object(
           'of', c.relname,
           'type', CASE k.contype WHEN 'p' THEN 'PRIMARY KEY' WHEN 'u' THEN 'UNIQUE' WHEN 'f' THEN 'FOREIGN KEY'
                                  WHEN 'c' THEN 'CHECK' WHEN 'x' THEN 'EXCLUDE' ELSE k.contype::text END,
           'columns', (SELECT jsonb_agg(a.attname ORDER BY u.n) FROM unnest(k.conkey) WITH ORDINALITY AS u(number, n)
                         JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = u.number),
           'expression', pg_get_expr(k.conbin, k.conrelid),
           'references', CASE WHEN k.confrelid <> 0 THEN concat(k.confrelid::regclass, ' (', (
                SELECT string_agg(a.attname, ', ' ORDER BY u.n) FROM unnest(k.confkey) WITH ORDINALITY AS u(number, n)
                  JOIN pg_attribute a ON a.attrelid = k.confrelid AND a.attnum = u.number), ')') END,
           'actions', CASE WHEN k.contype = 'f' THEN concat('match ', k.confmatchtype, ', update ', k.confupdtype,
                                                            ', delete ', k.confdeltype) END,
           'deferrable', k.condeferrable, 'deferred', k.condeferred, 'valid', k.convalidated,
           'enforced', coalesce(to_jsonb(k) ->> 'conenforced', 'true') = 'true',
           'inherited', NOT k.conislocal OR k.coninhcount > 0, 'no inherit', k.contype = 'c' AND k.connoinherit,
           -- What makes a foreign key hold. DISABLE TRIGGER ALL disables these too.
           'triggers', (SELECT jsonb_agg(concat(p.proname, ' ', t.tgenabled) ORDER BY p.proname COLLATE "C")
                          FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid WHERE t.tgconstraint = k.oid))
  FROM ours c JOIN pg_constraint k ON k.conrelid = c.oid WHERE k.contype <> 'n'

UNION ALL
SELECT 'index', c.relname, jsonb_build_object(
           'of', t.relname, 'method', m.amname, 'unique', i.indisunique, 'primary', i.indisprimary,
           'exclusion', i.indisexclusion, 'immediate', i.indimmediate,
           'nulls not distinct', coalesce(to_jsonb(i) ->> 'indnullsnotdistinct', 'false') = 'true',
           'valid', i.indisvalid AND i.indisready AND i.indislive, 'predicate', pg_get_expr(i.indpred, i.indrelid),
           'columns', (SELECT jsonb_agg(concat_ws(' ', pg_get_indexdef(i.indexrelid, u.n::integer, true), o.opcname,
                                                  l.collname, nullif(u.option, 0)) ORDER BY u.n)
                         FROM unnest(i.indclass::oid[], i.indcollation::oid[], i.indoption::smallint[])
                              WITH ORDINALITY AS u(class, collation_oid, option, n)
                         LEFT JOIN pg_opclass o ON o.oid = u.class LEFT JOIN pg_collation l ON l.oid = u.collation_oid),
           'expressions', i.indexprs IS NOT NULL,
           'included', (SELECT jsonb_agg(pg_get_indexdef(i.indexrelid, n, true) ORDER BY n)
                          FROM generate_series(i.indnkeyatts + 1, i.indnatts) AS n))
  FROM ours c
  JOIN pg_index i ON i.indexrelid = c.oid
  JOIN pg_class t ON t.oid = i.indrelid
  JOIN pg_am m ON m.oid = c.relam

UNION ALL
SELECT 'function', concat(p.proname, '(', oidvectortypes(p.proargtypes), ')'), jsonb_build_object(
           'body', encode(sha256(convert_to(p.prosrc, 'UTF8')), 'hex'), 'arguments', pg_get_function_arguments(p.oid),
           'result', pg_get_function_result(p.oid), 'kind', p.prokind, 'language', l.lanname,
           'security', CASE WHEN p.prosecdef THEN 'definer' ELSE 'invoker' END,
           'settings', (SELECT jsonb_agg(s ORDER BY s COLLATE "C") FROM unnest(p.proconfig) AS s),
           'volatility', p.provolatile, 'parallel', p.proparallel, 'strict', p.proisstrict, 'leakproof', p.proleakproof,
           'support', nullif(p.prosupport::oid, 0) IS NOT NULL, 'parsed', to_jsonb(p) ->> 'prosqlbody' IS NOT NULL,
           'owner', pg_get_userbyid(p.proowner), 'grants', g.list)
  FROM pg_proc p
  JOIN pg_language l ON l.oid = p.prolang
  LEFT JOIN granted g ON g.catalog = 'pg_proc'::regclass AND g.object = p.oid
 WHERE p.pronamespace = to_regnamespace('tga')

UNION ALL
SELECT 'trigger', concat(c.relname, '.', t.tgname), jsonb_build_object(
           'of', c.relname, 'function', t.tgfoid::regprocedure::text,
           'enabled', CASE t.tgenabled WHEN 'A' THEN 'always' WHEN 'O' THEN 'not for replicas'
                                       WHEN 'R' THEN 'only for replicas' ELSE 'never' END,
           'fires', concat_ws(' ', CASE WHEN t.tgtype & 64 <> 0 THEN 'INSTEAD OF' WHEN t.tgtype & 2 <> 0 THEN 'BEFORE'
                                        ELSE 'AFTER' END,
                              CASE WHEN t.tgtype & 4 <> 0 THEN 'INSERT' END,
                              CASE WHEN t.tgtype & 8 <> 0 THEN 'DELETE' END,
                              CASE WHEN t.tgtype & 16 <> 0 THEN 'UPDATE' END,
                              CASE WHEN t.tgtype & 32 <> 0 THEN 'TRUNCATE' END,
                              CASE WHEN t.tgtype & 1 <> 0 THEN 'FOR EACH ROW' ELSE 'FOR EACH STATEMENT' END),
           'columns', (SELECT jsonb_agg(a.attname ORDER BY a.attname COLLATE "C")
                         FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum = ANY (t.tgattr::smallint[])),
           'when', CASE WHEN t.tgqual IS NOT NULL THEN pg_get_triggerdef(t.oid) END,
           'arguments', nullif(encode(t.tgargs, 'escape'), ''),
           'deferrable', t.tgdeferrable, 'deferred', t.tginitdeferred,
           'transition tables', nullif(concat_ws(' ', t.tgoldtable, t.tgnewtable), ''))
  FROM ours c JOIN pg_trigger t ON t.tgrelid = c.oid WHERE NOT t.tgisinternal

UNION ALL
SELECT 'rule', concat(c.relname, '.', r.rulename), jsonb_build_object(
           'of', c.relname, 'event', r.ev_type, 'enabled', r.ev_enabled, 'instead', r.is_instead)
  FROM ours c JOIN pg_rewrite r ON r.ev_class = c.oid
 WHERE NOT (c.relkind IN ('v', 'm') AND r.ev_type = '1')  -- a view's query

UNION ALL
SELECT 'policy', concat(c.relname, '.', y.polname), jsonb_build_object(
           'of', c.relname, 'command', y.polcmd, 'permissive', y.polpermissive,
           'using', pg_get_expr(y.polqual, y.polrelid), 'check', pg_get_expr(y.polwithcheck, y.polrelid))
  FROM ours c JOIN pg_policy y ON y.polrelid = c.oid

UNION ALL
SELECT 'type', t.typname, jsonb_build_object(
           'type', CASE t.typtype WHEN 'c' THEN 'composite' WHEN 'e' THEN 'enum' WHEN 'd' THEN 'domain'
                                  ELSE t.typtype::text END,
           'owner', pg_get_userbyid(t.typowner), 'grants', g.list,
           'labels', (SELECT jsonb_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum e WHERE e.enumtypid = t.oid),
           'base', CASE WHEN t.typbasetype <> 0 THEN format_type(t.typbasetype, t.typtypmod) END,
           'not null', t.typnotnull, 'default', t.typdefault,
           'checks', (SELECT jsonb_agg(concat(k.conname, ' ', pg_get_expr(k.conbin, 0)) ORDER BY k.conname)
                        FROM pg_constraint k WHERE k.contypid = t.oid AND k.contype = 'c'))
  FROM pg_type t
  LEFT JOIN ours c ON c.oid = t.typrelid
  LEFT JOIN granted g ON g.catalog = 'pg_type'::regclass AND g.object = t.oid
 WHERE t.typnamespace = to_regnamespace('tga') AND (c.oid IS NULL OR c.relkind = 'c')
   AND NOT EXISTS (SELECT FROM pg_type e WHERE e.typarray = t.oid)

UNION ALL
SELECT 'role', r.rolname, jsonb_build_object(
           'superuser', r.rolsuper, 'creates roles', r.rolcreaterole, 'creates databases', r.rolcreatedb,
           'replication', r.rolreplication, 'bypasses row security', r.rolbypassrls,
           'can log in', CASE WHEN r.rolname = 'tga_owner' THEN r.rolcanlogin END,
           'member of', (SELECT jsonb_agg(DISTINCT pg_get_userbyid(m.roleid))
                           FROM pg_auth_members m WHERE m.member = r.oid))
  FROM pg_roles r WHERE r.rolname IN ('tga_owner', 'tga_gateway')

UNION ALL
-- Superusers need not be members, and whoever asks knows of himself.
SELECT DISTINCT 'member', concat(r.rolname, ' of tga_owner'), '{}'::jsonb
  FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.member
 WHERE m.roleid = to_regrole('tga_owner') AND NOT r.rolsuper AND r.rolname <> session_user

UNION ALL
-- Settings that sessions of ours begin with and that change what our triggers, rules and names mean.
SELECT 'setting', concat(split_part(entry, '=', 1),
                         CASE WHEN s.setrole <> 0 THEN ' of ' || pg_get_userbyid(s.setrole) END,
                         CASE WHEN s.setdatabase <> 0 THEN ' in this database' END),
       jsonb_build_object('value', substr(entry, strpos(entry, '=') + 1))
  FROM pg_db_role_setting s CROSS JOIN LATERAL unnest(s.setconfig) AS entry
 WHERE s.setdatabase IN (0, (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))
   AND s.setrole IN (0, to_regrole('tga_gateway'), to_regrole('tga_owner'))
   AND split_part(entry, '=', 1) IN ('session_replication_role', 'search_path', 'row_security')

UNION ALL
SELECT 'other', concat(o.type, ' ', o.identity), '{}'::jsonb
  FROM pg_depend d CROSS JOIN LATERAL pg_identify_object(d.classid, d.objid, 0) AS o
 WHERE d.refclassid = 'pg_namespace'::regclass AND d.refobjid = to_regnamespace('tga')
   AND d.classid NOT IN ('pg_class'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass)
