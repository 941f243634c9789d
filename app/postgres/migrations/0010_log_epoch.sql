-- The log began anew under another origin: which head the former one ended with, and what of it is lost.
INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id) VALUES ('system', 'log_epoch', 'tga/v1/log_epoch');
INSERT INTO tga.transitions (kind, from_state, artifact_type, to_state, is_birth)
SELECT 'system', 'OPEN', 'log_epoch', 'OPEN', is_birth FROM unnest(ARRAY[true, false]) AS is_birth;
