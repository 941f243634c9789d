-- The libraries as a submitted program sees them: without roads to the outside, without order or names that differ
-- between processes, without C functions that run long unseen. Everything here is a function in Lua or harmless in C.
local raw, env, part = ...
local charge, limits, patterns = part.charge, part.limits, part.patterns
local type, error, select, rawnext = raw.type, raw.error, raw.select, raw.next
local rawlen, rawequal, rawget, raw_tostring = raw.rawlen, raw.rawequal, raw.rawget, raw.tostring
local raw_getmetatable, raw_setmetatable = raw.debug.getmetatable, raw.setmetatable
local tonumber, load = raw.tonumber, raw.load
local format, sub, find, rep = raw.string.format, raw.string.sub, raw.string.find, raw.string.rep
local concat, sort, unpack = raw.table.concat, raw.table.sort, raw.table.unpack

local function kind_of(value)
  return value == nil and "no value" or type(value)
end

local function expected(index, name, what, value)
  error(format("bad argument #%d to '%s' (%s expected, got %s)", index, name, what, kind_of(value)), 3)
end

local function text_of(value, index, name)
  if type(value) == "string" then return value end
  if type(value) == "number" then return raw_tostring(value) end
  error(format("bad argument #%d to '%s' (string expected, got %s)", index, name, kind_of(value)), 4)
end

local function integer_of(value, index, name)
  local number = raw.math.tointeger(value) or (type(value) == "string" and raw.math.tointeger(tonumber(value)))
  if number then return number end
  local what = type(value) == "number" and "number has no integer representation"
    or "number expected, got " .. kind_of(value)
  error(format("bad argument #%d to '%s' (%s)", index, name, what), 4)
end

-- Names of tables and functions: numbered as they are first asked for, the same in every process.
local names = raw_setmetatable({}, { __mode = "k" })
local names_given = 0

local function name_of(value, kind)
  local name = names[value]
  if not name then
    names_given = names_given + 1
    name = format("%s: 0x%08x", kind, names_given)
    names[value] = name
  end
  return name
end

local function tostring(value)
  local kind = type(value)
  if kind == "string" then return value end
  if kind == "number" or kind == "boolean" or kind == "nil" then return raw_tostring(value) end
  local metatable = raw_getmetatable(value)
  if metatable then
    local convert = rawget(metatable, "__tostring")
    if convert ~= nil then
      local text = convert(value)
      if type(text) ~= "string" then error("'__tostring' must return a string", 2) end
      return text
    end
    local called = rawget(metatable, "__name")
    if type(called) == "string" then return name_of(value, called) end
  end
  return name_of(value, kind)
end

-- Order of keys: numbers, then strings by bytes, then booleans. Keys that are tables or functions have no order that
-- two processes share: one of them is fine, of more than one pairs refuses to choose.
local RANKS = { number = 1, string = 2, boolean = 3 }

local function is_before(a, b)
  local kind_a, kind_b = type(a), type(b)
  if kind_a ~= kind_b then return (RANKS[kind_a] or 4) < (RANKS[kind_b] or 4) end
  if kind_a == "boolean" then return not a and b end
  return a < b
end

local function sorted_keys(t)
  local keys, count, is_sequence, kind, objects = {}, 0, true, nil, 0
  for key in rawnext, t do
    count = count + 1
    keys[count] = key
    if is_sequence and key ~= count then is_sequence = false end
    local key_kind = type(key)
    kind = (kind == nil or kind == key_kind) and key_kind or "mixed"
    if not RANKS[key_kind] then objects = objects + 1 end
  end
  charge(count)
  if is_sequence then return keys, count end
  if objects > 1 then
    error(format("expected keys that have an order, found %d keys that are tables or functions: their order differs "
      .. "from one attempt to the next. Keep them in a list", objects), 3)
  end
  charge(count * 4)
  if kind == "string" or kind == "number" then sort(keys) else sort(keys, is_before) end
  return keys, count
end

local snapshots = raw_setmetatable({}, { __mode = "k" })

local function next_after(t, key)
  local snapshot = snapshots[t]
  local at = snapshot and snapshot.places[key]
  local keys, count
  if at then
    keys, count = snapshot.keys, snapshot.count
  else
    keys, count = sorted_keys(t)
    at = 0
    while at < count and not is_before(key, keys[at + 1]) do at = at + 1 end
  end
  for index = at + 1, count do
    local value = rawget(t, keys[index])
    if value ~= nil then return keys[index], value end
  end
  return nil
end

local function next(t, key)
  if type(t) ~= "table" then expected(1, "next", "table", t) end
  if key ~= nil then return next_after(t, key) end
  local first, value = rawnext(t)
  if first == nil then return nil end
  if rawnext(t, first) == nil then return first, value end
  local keys, count = sorted_keys(t)
  local places = {}
  for index = 1, count do places[keys[index]] = index end
  snapshots[t] = { keys = keys, count = count, places = places }
  return keys[1], rawget(t, keys[1])
end

local function pairs(t)
  local metatable = raw_getmetatable(t)
  local custom = metatable and rawget(metatable, "__pairs")
  if custom then
    local iterate, state, first = custom(t)
    return iterate, state, first
  end
  if type(t) ~= "table" then expected(1, "for iterator 'for iterator'", "table", t) end
  local keys, count = sorted_keys(t)
  local at = 0
  return function()
    while at < count do
      at = at + 1
      local key = keys[at]
      local value = rawget(t, key)
      if value ~= nil then return key, value end
    end
    return nil
  end, t, nil
end

local function step(t, index)
  index = index + 1
  local value = t[index]
  if value ~= nil then return index, value end
end

local function ipairs(t)
  if t == nil then expected(1, "ipairs", "table", t) end
  return step, t, 0
end

-- Metatables: no finalizers and no weak tables, whose moments the collector chooses.
local function setmetatable(t, metatable)
  if type(metatable) == "table" then
    if rawget(metatable, "__gc") ~= nil or rawget(metatable, "__mode") ~= nil then
      error("expected a metatable without __gc and __mode, which act when the collector runs; found one of them. "
        .. "Remove it: every attempt must do the same", 2)
    end
  elseif metatable ~= nil then
    expected(2, "setmetatable", "nil or table", metatable)
  end
  if type(t) ~= "table" then expected(1, "setmetatable", "table", t) end
  return raw_setmetatable(t, metatable)
end

-- Text programs only, in the program's own environment or one of its tables; never bytecode.
local function load_text(chunk, name, mode, ...)
  if type(chunk) == "function" then
    local pieces, size = {}, 0
    while true do
      local piece = chunk()
      if piece == nil or piece == "" then break end
      if type(piece) ~= "string" then return nil, "reader function must return a string" end
      pieces[#pieces + 1] = piece
      size = size + #piece
      if size > limits.load_bytes then break end
    end
    chunk = concat(pieces)
  elseif type(chunk) ~= "string" then
    expected(1, "load", "string", chunk)
  end
  if #chunk > limits.load_bytes then
    return nil, format("expected at most %d bytes to load, found %d", limits.load_bytes, #chunk)
  end
  if mode ~= nil and not (type(mode) == "string" and find(mode, "t", 1, true)) then
    return nil, "attempt to load a binary chunk: only text can be loaded"
  end
  charge(#chunk * 4)
  name = type(name) == "string" and name or chunk
  name = raw.string.gsub(sub(name, 1, 60), "[^%w ._/-]", " ")
  if select("#", ...) > 0 then return load(chunk, "=load " .. name, "t", (...)) end
  return load(chunk, "=load " .. name, "t", env)
end

local function collectgarbage(option)
  if option == nil or option == "collect" or option == "step" or option == "count" then return 0 end
  if option == "isrunning" then return true end
  error("expected collectgarbage with count, collect or step, found " .. tostring(option)
    .. ": the collector is the host's", 2)
end

-- string
local strings = {}
for _, name in raw.ipairs({ "byte", "char", "len", "packsize", "sub", "unpack", "pack" }) do
  strings[name] = raw.string[name]
end

-- As C has it, and charged by the length of the text.
local function charged(f)
  return function(text, ...)
    if type(text) == "string" then charge(#text >> 3) end
    return f(text, ...)
  end
end

strings.lower, strings.reverse = charged(raw.string.lower), charged(raw.string.reverse)
strings.upper = charged(raw.string.upper)

function strings.rep(text, count, separator)
  text, count = text_of(text, 1, "rep"), integer_of(count, 2, "rep")
  separator = separator == nil and "" or text_of(separator, 3, "rep")
  local size = #text + #separator
  if count <= 0 or size == 0 then return "" end
  if count > limits.state_bytes // size then error("resulting string too large", 2) end
  charge(size * count // 16)
  return rep(text, count, separator)
end

function strings.format(template, ...)
  template = text_of(template, 1, "format")
  local arguments, at, count = nil, 0, select("#", ...)
  local from = 1
  while true do
    local start, stop, letter = find(template, "%%[-+ #0]*%d*%.?%d*(.)", from)
    if not start then break end
    from = stop + 1
    if letter ~= "%" then
      at = at + 1
      if letter == "p" then
        error("invalid conversion '%p' to 'format': addresses differ from one attempt to the next", 2)
      end
      if letter == "s" and at <= count then
        arguments = arguments or { ... }
        local value = arguments[at]
        local kind = type(value)
        if kind == "table" or kind == "function" or kind == "thread" then arguments[at] = tostring(value) end
      end
    end
  end
  charge(#template)
  if arguments then return format(template, unpack(arguments, 1, count)) end
  return format(template, ...)
end

function strings.find(text, pattern, init, plain)
  text, pattern = text_of(text, 1, "find"), text_of(pattern, 2, "find")
  charge(#text >> 3)
  return patterns.find(text, pattern, init == nil and 1 or integer_of(init, 3, "find"), plain)
end

function strings.match(text, pattern, init)
  text, pattern = text_of(text, 1, "match"), text_of(pattern, 2, "match")
  charge(#text >> 3)
  return patterns.match(text, pattern, init == nil and 1 or integer_of(init, 3, "match"))
end

function strings.gmatch(text, pattern, init)
  text, pattern = text_of(text, 1, "gmatch"), text_of(pattern, 2, "gmatch")
  charge(#text >> 3)
  return patterns.gmatch(text, pattern, init == nil and 1 or integer_of(init, 3, "gmatch"))
end

function strings.gsub(text, pattern, replacement, count_max)
  text, pattern = text_of(text, 1, "gsub"), text_of(pattern, 2, "gsub")
  if type(replacement) == "number" then replacement = raw_tostring(replacement) end
  local kind = type(replacement)
  if kind ~= "string" and kind ~= "table" and kind ~= "function" then
    expected(3, "gsub", "string/function/table", replacement)
  end
  charge(#text >> 3)
  return patterns.gsub(text, pattern, replacement, count_max == nil and #text + 1 or integer_of(count_max, 4, "gsub"))
end

-- The program's globals
local utf8s = {}
for name, value in rawnext, raw.utf8 do utf8s[name] = value end
utf8s.len, utf8s.offset = charged(raw.utf8.len), charged(raw.utf8.offset)

env._VERSION = raw._VERSION
env.assert, env.error, env.getmetatable, env.select = raw.assert, error, raw.getmetatable, select
env.rawequal, env.rawget, env.rawlen, env.rawset = rawequal, rawget, rawlen, raw.rawset
env.tonumber, env.type = tonumber, type
env.tostring, env.next, env.pairs, env.ipairs, env.setmetatable = tostring, next, pairs, ipairs, setmetatable
env.load, env.collectgarbage = load_text, collectgarbage
part.text_of, part.integer_of, part.expected = text_of, integer_of, expected
local maths, times, configure = part.determinism(raw, part)
env.string, env.table, env.math, env.os, env.utf8 = strings, part.tables(raw, part), maths, times, utf8s
part.host.tostring = tostring

local string_metatable = raw_getmetatable("")
string_metatable.__index = strings
string_metatable.__metatable = "string"

return configure
