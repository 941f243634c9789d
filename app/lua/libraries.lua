-- The libraries as a submitted program sees them: without roads to the outside, without order or names that differ
-- between processes, without C functions that run long unseen. Everything here is a function in Lua or harmless in C.
local raw, env, part = ...
local charge, check, here, warn, limits, patterns, codec = part.charge, part.check, part.here, part.warn, part.limits, part.patterns, part.codec
local type, error, select, rawnext, rawlen, rawequal = raw.type, raw.error, raw.select, raw.next, raw.rawlen, raw.rawequal
local raw_getmetatable, raw_setmetatable, rawget, raw_tostring = raw.debug.getmetatable, raw.setmetatable, raw.rawget, raw.tostring
local math_type, tonumber, format, byte, sub, find = raw.math.type, raw.tonumber, raw.string.format, raw.string.byte, raw.string.sub, raw.string.find
local concat, sort, insert, remove, unpack, move = raw.table.concat, raw.table.sort, raw.table.insert, raw.table.remove, raw.table.unpack, raw.table.move
local rep, load, raw_os, raw_random, raw_randomseed = raw.string.rep, raw.load, raw.os, raw.math.random, raw.math.randomseed

local function expected(index, name, what, value)
  error(format("bad argument #%d to '%s' (%s expected, got %s)", index, name, what, value == nil and "no value" or type(value)), 3)
end

local function text_of(value, index, name)
  if type(value) == "string" then return value end
  if type(value) == "number" then return raw_tostring(value) end
  error(format("bad argument #%d to '%s' (string expected, got %s)", index, name, value == nil and "no value" or type(value)), 4)
end

local function integer_of(value, index, name)
  local number = raw.math.tointeger(value) or (type(value) == "string" and raw.math.tointeger(tonumber(value)))
  if number then return number end
  error(format("bad argument #%d to '%s' (%s)", index, name, type(value) == "number"
    and "number has no integer representation" or "number expected, got " .. (value == nil and "no value" or type(value))), 4)
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
    error(format("expected keys that have an order, found %d keys that are tables or functions: their order differs from "
      .. "one attempt to the next. Keep them in a list", objects), 3)
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
  error("expected collectgarbage with count, collect or step, found " .. tostring(option) .. ": the collector is the host's", 2)
end

-- string ---------------------------------------------------------------------------------------------------------------
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
      if letter == "p" then error("invalid conversion '%p' to 'format': addresses differ from one attempt to the next", 2) end
      if letter == "s" and at <= count then
        arguments = arguments or { ... }
        local value = arguments[at]
        if type(value) == "table" or type(value) == "function" or type(value) == "thread" then arguments[at] = tostring(value) end
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
  if kind ~= "string" and kind ~= "table" and kind ~= "function" then expected(3, "gsub", "string/function/table", replacement) end
  charge(#text >> 3)
  return patterns.gsub(text, pattern, replacement, count_max == nil and #text + 1 or integer_of(count_max, 4, "gsub"))
end

-- table ----------------------------------------------------------------------------------------------------------------
-- Plain tables go to C; those with a metatable are walked here, so that metamethods may perform operations.
local tables = { pack = raw.table.pack }

function tables.unpack(list, first, last)
  if type(list) ~= "table" or not raw_getmetatable(list) then return unpack(list, first, last) end
  first = first == nil and 1 or integer_of(first, 2, "unpack")
  last = last == nil and #list or integer_of(last, 3, "unpack")
  if first > last then return end
  if last - first >= 100000 or last - first < 0 then error("too many results to unpack", 2) end
  local values = {}
  for index = first, last do values[index - first + 1] = list[index] end
  return unpack(values, 1, last - first + 1)
end

function tables.concat(list, separator, first, last)
  if type(list) ~= "table" then expected(1, "concat", "table", list) end
  separator = separator == nil and "" or text_of(separator, 2, "concat")
  first = first == nil and 1 or integer_of(first, 3, "concat")
  last = last == nil and #list or integer_of(last, 4, "concat")
  if not raw_getmetatable(list) then
    charge(rawlen(list))
    return concat(list, separator, first, last)
  end
  local values, count = {}, 0
  for index = first, last do
    local value = list[index]
    if type(value) ~= "string" and type(value) ~= "number" then
      error(format("invalid value (at index %d) in table for 'concat'", index), 2)
    end
    count = count + 1
    values[count] = value
    if index == last then break end
  end
  return concat(values, separator, 1, count)
end

function tables.insert(list, ...)
  if type(list) ~= "table" then expected(1, "insert", "table", list) end
  local count = select("#", ...)
  local at, value = ...
  if not raw_getmetatable(list) then
    if count > 1 then charge(rawlen(list)) end
    return insert(list, ...)
  end
  local after = #list + 1
  if count == 1 then
    list[after] = at
  elseif count == 2 then
    at = integer_of(at, 2, "insert")
    if at < 1 or at > after then error("bad argument #2 to 'insert' (position out of bounds)", 2) end
    for index = after, at + 1, -1 do list[index] = list[index - 1] end
    list[at] = value
  else
    error("wrong number of arguments to 'insert'", 2)
  end
end

function tables.remove(list, at)
  if type(list) ~= "table" then expected(1, "remove", "table", list) end
  if not raw_getmetatable(list) then
    charge(at ~= nil and rawlen(list) or 0)
    if at == nil then return remove(list) end
    return remove(list, at)
  end
  local size = #list
  local place = at == nil and size or integer_of(at, 2, "remove")
  if at ~= nil and size + 1 ~= place and (place < 1 or place > size + 1) and not (size == 0 and place == 0) then
    error("bad argument #2 to 'remove' (position out of bounds)", 2)
  end
  local value = list[place]
  for index = place, size - 1 do list[index] = list[index + 1] end
  if place <= size then list[size] = nil end
  return value
end

function tables.move(source, first, last, to, target)
  if type(source) ~= "table" then expected(1, "move", "table", source) end
  target = target == nil and source or target
  if type(target) ~= "table" then expected(5, "move", "table", target) end
  first, last, to = integer_of(first, 2, "move"), integer_of(last, 3, "move"), integer_of(to, 4, "move")
  if last < first then return target end
  local count = last - first
  if count < 0 or count > limits.state_bytes then error("too many elements to move", 2) end
  if count < 10000 and not raw_getmetatable(source) and not raw_getmetatable(target) then
    charge(count)
    return move(source, first, last, to, target)
  end
  if to > raw.math.maxinteger - count then error("bad argument #4 to 'move' (destination wrap around)", 2) end
  if to > last or to <= first or not rawequal(source, target) then
    for index = 0, count do target[to + index] = source[first + index] end
  else
    for index = count, 0, -1 do target[to + index] = source[first + index] end
  end
  return target
end

-- A merge sort: the same comparisons in every process, equal elements keep their order, and no comparator is "invalid".
local function merge_sort(list, count, before)
  local from, to = {}, {}
  for index = 1, count do from[index] = list[index] end
  local width = 1
  while width < count do
    for start = 1, count, 2 * width do
      local left, right = start, start + width
      local left_end, right_end = start + width - 1, start + 2 * width - 1
      if left_end > count then left_end = count end
      if right_end > count then right_end = count end
      for at = start, right_end do
        if left <= left_end and (right > right_end or not before(from[right], from[left])) then
          to[at], left = from[left], left + 1
        else
          to[at], right = from[right], right + 1
        end
      end
    end
    from, to = to, from
    width = 2 * width
  end
  for index = 1, count do list[index] = from[index] end
end

local function less(a, b) return a < b end

function tables.sort(list, before)
  if type(list) ~= "table" then expected(1, "sort", "table", list) end
  if before ~= nil and type(before) ~= "function" then expected(2, "sort", "function", before) end
  local count = #list
  if count < 2 then return end
  if count > limits.state_bytes then error("array too big", 2) end
  if not before and not raw_getmetatable(list) then
    local kind = type(list[1]) == "string" and "string" or math_type(list[1])
    local is_plain = kind ~= nil
    for index = 2, is_plain and count or 0 do
      local value = list[index]
      if (kind == "string" and type(value) ~= "string") or (kind ~= "string" and (math_type(value) ~= kind or value ~= value)) then
        is_plain = false
        break
      end
    end
    if is_plain and list[1] == list[1] then
      charge(count * 8)
      return sort(list)
    end
  end
  merge_sort(list, count, before or less)
end

-- math and os: what would differ between attempts ----------------------------------------------------------------------
local draws = {}             -- the generator's four words (xoshiro256**), seeded for the run
local is_live, is_strict, epoch_s = false, false, 0

local function seed_draws(a, b)
  -- splitmix64, so that seeds that are close give streams that are not
  local word = a
  for index = 1, 4 do
    word = word + 0x9E3779B97F4A7C15
    local mixed = word ~ b
    mixed = (mixed ~ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ~ (mixed >> 27)) * 0x94D049BB133111EB
    draws[index] = mixed ~ (mixed >> 31)
  end
end

local function draw()
  local one, two, three, four = draws[1], draws[2], draws[3], draws[4]
  local word = two * 5
  word = ((word << 7) | (word >> 57)) * 9
  three, four = three ~ one, four ~ two
  draws[1], draws[2] = one ~ four, two ~ three
  draws[3], draws[4] = three ~ (two << 17), (four << 45) | (four >> 19)
  return word
end

local function seeded(...)
  local word, count = draw(), select("#", ...)
  if count == 0 then return (word >> 11) * (0.5 / (1 << 52)) end
  local low, high = ...
  if count == 1 then
    low, high = 1, integer_of(low, 1, "random")
    if high == 0 then return word end
  elseif count == 2 then
    low, high = integer_of(low, 1, "random"), integer_of(high, 2, "random")
  else
    error("wrong number of arguments", 3)
  end
  if low > high then error(format("bad argument #%d to 'random' (interval is empty)", count), 3) end
  local span = high - low
  if span & (span + 1) == 0 then return low + (word & span) end
  local mask = span
  for shift = 0, 5 do mask = mask | (mask >> (1 << shift)) end
  word = word & mask
  while raw.math.ult(span, word) do word = draw() & mask end
  return low + word
end

--- The program asks for what differs between attempts: told once a line, or stopped where the procedure is strict.
local function nondeterministic(name, instead)
  local chunk, line = here()
  local what = name .. " outside a checkpoint is not what it says: " .. instead
  if is_strict then
    local text = format("%s:%s: %s stands outside a checkpoint, and strict_determinism is on. Call it inside "
      .. "checkpoint(function() ... end), whose result is recorded", chunk or "?", line or "?", name)
    if part.host.refuse then part.host.refuse(text) end
    error(text, 0)
  end
  warn(line, what .. ". Call it inside checkpoint(function() ... end), whose result is recorded")
end

local maths = {}
for name, value in rawnext, raw.math do maths[name] = value end

function maths.random(...)
  if is_live then return raw_random(...) end
  nondeterministic("math.random", "it draws from the run's own seed")
  return seeded(...)
end

function maths.randomseed(...)
  if is_live then
    raw_randomseed(...)
    return
  end
  nondeterministic("math.randomseed", "it seeds the run's own draws")
  local a, b = ...
  if a == nil then a, b = draw(), draw() end
  seed_draws(raw.math.tointeger(a) or raw.string.unpack("<i8", raw.string.pack("<n", tonumber(a) or 0)), raw.math.tointeger(b) or 0)
end

local times = {}

function times.time(fields)
  if fields ~= nil then return raw_os.time(fields) end
  if is_live then return raw_os.time() end
  nondeterministic("os.time", "it is the time at which the run was made")
  return epoch_s
end

function times.date(template, at)
  template = template == nil and "%c" or text_of(template, 1, "date")
  if byte(template, 1) ~= 33 then template = "!" .. template end
  if at == nil then
    if is_live then
      at = raw_os.time()
    else
      nondeterministic("os.date", "it is the time at which the run was made")
      at = epoch_s
    end
  end
  if #template > 1000 then error("bad argument #1 to 'date' (at most 1000 characters expected)", 2) end
  return raw_os.date(template, at)
end

function times.clock()
  if is_live then return raw_os.clock() end
  nondeterministic("os.clock", "it is 0")
  return 0.0
end

function times.getenv(name)
  text_of(name, 1, "getenv")
  if not is_live then nondeterministic("os.getenv", "it is nil") end
  return nil
end

function times.tmpname()
  if is_live then return format("/tmp/lua_%08x", raw_random(0) & 0xFFFFFFFF) end
  nondeterministic("os.tmpname", "it is drawn from the run's own seed")
  return format("/tmp/lua_%08x", draw() & 0xFFFFFFFF)
end

function times.difftime(later, earlier)
  return raw_os.difftime(later, earlier == nil and 0 or earlier)
end

part.host.in_checkpoint = function(is_inside)
  is_live = is_inside and true or false
end

-- The program's globals --------------------------------------------------------------------------------------------------
local utf8s = {}
for name, value in rawnext, raw.utf8 do utf8s[name] = value end
utf8s.len, utf8s.offset = charged(raw.utf8.len), charged(raw.utf8.offset)

env._VERSION = raw._VERSION
for _, name in raw.ipairs({ "assert", "error", "getmetatable", "rawequal", "rawget", "rawlen", "rawset", "select", "tonumber", "type" }) do
  env[name] = raw[name]
end
env.tostring, env.next, env.pairs, env.ipairs, env.setmetatable = tostring, next, pairs, ipairs, setmetatable
env.load, env.collectgarbage = load_text, collectgarbage
env.string, env.table, env.math, env.os, env.utf8 = strings, tables, maths, times, utf8s
part.host.tostring = tostring

local string_metatable = raw_getmetatable("")
string_metatable.__index = strings
string_metatable.__metatable = "string"

return function(settings, live_seed)
  is_strict, epoch_s = settings.strict, settings.epoch_s
  seed_draws(settings.seed[1], settings.seed[2])
  raw_randomseed(live_seed)
end
