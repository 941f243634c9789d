-- The rules of a trace, as data. A test compares them with app/domain/tga/transitions.py, row by row.

INSERT INTO tga.stream_kinds (kind, id_field, entry_schema_id, birth_state)
VALUES ('trace', 'trace_id', 'tga/v1/execution_log_entry', 'PENDING');

INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id, verdict_field, binds_field, settles_claim) VALUES
    ('trace', 'action_request',      'tga/v1/action_request',      NULL,       NULL,                         false),
    ('trace', 'supervisor_decision', 'tga/v1/supervisor_decision', 'decision', 'action_request_digest',      false),
    ('trace', 'tool_call',           'tga/v1/tool_call',           NULL,       'supervisor_decision_digest', false),
    ('trace', 'tool_effect',         'tga/v1/tool_effect',         'outcome',  'tool_call_digest',           true);

INSERT INTO tga.transitions (kind, from_state, artifact_type, verdict, to_state, is_birth) VALUES
    ('trace', 'PENDING',    'action_request',      '',        'PENDING',    true),
    ('trace', 'PENDING',    'supervisor_decision', 'APPROVE', 'AUTHORIZED', false),
    ('trace', 'PENDING',    'supervisor_decision', 'DENY',    'DENIED',     false),
    ('trace', 'AUTHORIZED', 'tool_call',           '',        'EXECUTING',  false),
    ('trace', 'EXECUTING',  'tool_effect',         'SUCCESS', 'COMPLETED',  false),
    ('trace', 'EXECUTING',  'tool_effect',         'FAILURE', 'FAILED',     false);
