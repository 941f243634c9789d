-- A program that runs can be started of.
INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id)
VALUES ('system', 'procedure_registration', 'tga/v1/procedure_registration');
INSERT INTO tga.transitions (kind, from_state, artifact_type, to_state, is_birth)
SELECT 'system', 'OPEN', 'procedure_registration', 'OPEN', is_birth FROM unnest(ARRAY[true, false]) AS is_birth;
