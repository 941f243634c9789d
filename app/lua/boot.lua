-- Puts the trusted parts together in a fresh state. The raw libraries are reachable from their upvalues alone.
local codec_part, patterns_part, determinism_part, tables_part, libraries_part, sandbox_part, limits = ...
local raw = {}
for name, value in next, _G do
  if type(value) == "table" and name ~= "_G" then
    local copy = {}
    for field, inner in next, value do copy[field] = inner end
    value = copy
  end
  raw[name] = value
end
local codec = codec_part(raw)
local patterns = patterns_part(raw)
local parts = { codec = codec, patterns = patterns, determinism = determinism_part, tables = tables_part }
local control = sandbox_part(raw, parts, libraries_part, limits)

-- The registry still names these tables: empty them, so that nothing found there is of use.
local globals, loaded = _G, package.loaded
local libraries = { debug, io, os, package, string, table, coroutine, math, utf8, python }
for _, library in raw.ipairs(libraries) do
  for name in raw.next, library do library[name] = nil end
end
for name in raw.next, loaded do loaded[name] = nil end
for name in raw.next, globals do globals[name] = nil end
raw.python, raw.io, raw.package, raw.require, raw.dofile, raw.loadfile = nil, nil, nil, nil, nil, nil
raw.os.execute, raw.os.exit, raw.os.remove, raw.os.rename, raw.os.setlocale = nil, nil, nil, nil, nil
raw.os.getenv, raw.os.tmpname, raw.debug.getregistry, raw.debug.debug = nil, nil, nil, nil
return control
