-- Lua patterns with a bound: string.find and its relatives run in C, where no limit of instructions reaches them.
-- What could take long there is matched here instead, by instructions that are counted. Same results, same messages.
local raw = ...
local byte, find, sub, gsub = raw.string.byte, raw.string.find, raw.string.sub, raw.string.gsub
local concat = raw.table.concat
local error, type, unpack, tostring = raw.error, raw.type, raw.table.unpack, raw.tostring

local STEPS_IN_C_MAX <const> = 200000
local CAPTURES_MAX <const> = 32
local DEPTH_MAX <const> = 150
local patterns = {}

-- How long the C function may take at worst: each repetition can be tried at every length, from every start.
local costs = {}
local costs_known = 0

local function repetitions(pattern)
  local known = costs[pattern]
  if known then return known end
  local count, at = 0, 1
  while true do
    at = find(pattern, "[*+%-%%]", at)
    if not at then break end
    if byte(pattern, at) ~= 37 then
      count = count + 1
      at = at + 1
    else
      local after = byte(pattern, at + 1)
      if after == 98 or (after and after >= 48 and after <= 57) then count = count + 1 end
      at = at + 2
    end
  end
  if costs_known < 512 and #pattern < 256 then
    costs_known = costs_known + 1
    costs[pattern] = count
  end
  return count
end

local function is_cheap(text, pattern)
  local length = #text + 1
  local steps = length * (#pattern + 1)
  for _ = 1, repetitions(pattern) do
    if steps > STEPS_IN_C_MAX then return false end
    steps = steps * length
  end
  return steps <= STEPS_IN_C_MAX or (length <= 16777216 and repetitions(pattern) == 0)
end

-- The matcher, after the reference manual's section 6.4.1.
local match

local function class_end(m, at)
  local pattern = m.pattern
  local mark = byte(pattern, at)
  at = at + 1
  if mark == 37 then
    if at > #pattern then error("malformed pattern (ends with '%')", 0) end
    return at + 1
  end
  if mark == 91 then
    if byte(pattern, at) == 94 then at = at + 1 end
    repeat
      if at > #pattern then error("malformed pattern (missing ']')", 0) end
      local inner = byte(pattern, at)
      at = at + 1
      if inner == 37 then at = at + 1 end
    until byte(pattern, at) == 93 and at <= #pattern
    return at + 1
  end
  return at
end

local singles = {}

-- A test of one byte against one class, made once for each class of the pattern; C decides it on one byte.
local function single(class)
  local known = singles[class]
  if known then return known end
  local set = {}
  for code = 0, 255 do
    set[code] = find(raw.string.char(code), class) ~= nil
  end
  singles[class] = set
  return set
end

local function class_set(m, at, stop)
  local sets = m.sets
  local set = sets[at]
  if not set then
    set = single("^" .. sub(m.pattern, at, stop - 1))
    sets[at] = set
  end
  return set
end

local function capture_text(m, index)
  local from, length = m.from[index], m.length[index]
  if length == -1 then error("unfinished capture", 0) end
  if length == -2 then return from end
  return sub(m.text, from, from + length - 1)
end

local function match_balance(m, s, p)
  if p + 1 > #m.pattern then error("malformed pattern (missing arguments to '%b')", 0) end
  local text = m.text
  local open, close = byte(m.pattern, p), byte(m.pattern, p + 1)
  if byte(text, s) ~= open then return nil end
  local depth = 1
  for at = s + 1, #text do
    local code = byte(text, at)
    if code == close then
      depth = depth - 1
      if depth == 0 then return at + 1 end
    elseif code == open then
      depth = depth + 1
    end
  end
  return nil
end

local function close_capture(m, s, p)
  for index = m.level, 1, -1 do
    if m.length[index] == -1 then
      m.length[index] = s - m.from[index]
      local stop = match(m, s, p)
      if not stop then m.length[index] = -1 end
      return stop
    end
  end
  error("invalid pattern capture", 0)
end

local function open_capture(m, s, p, length)
  if m.level >= CAPTURES_MAX then error("too many captures", 0) end
  m.level = m.level + 1
  m.from[m.level], m.length[m.level] = s, length
  local stop = match(m, s, p)
  if not stop then m.level = m.level - 1 end
  return stop
end

local function back_reference(m, s, code)
  local index = code - 48
  if index < 1 or index > m.level or m.length[index] == -1 then
    error("invalid capture index %" .. index .. " in pattern", 0)
  end
  local wanted = capture_text(m, index)
  if type(wanted) ~= "string" then return nil end
  if sub(m.text, s, s + #wanted - 1) == wanted then return s + #wanted end
  return nil
end

function match(m, s, p)
  m.depth = m.depth + 1
  if m.depth > DEPTH_MAX then error("pattern too complex", 0) end
  local pattern, text = m.pattern, m.text
  local result
  while true do
    if p > #pattern then result = s break end
    local mark = byte(pattern, p)
    if mark == 40 then
      if byte(pattern, p + 1) == 41 then result = open_capture(m, s, p + 2, -2)
      else result = open_capture(m, s, p + 1, -1) end
      break
    elseif mark == 41 then
      result = close_capture(m, s, p + 1)
      break
    elseif mark == 36 and p == #pattern then
      result = s == #text + 1 and s or nil
      break
    end
    local after = mark == 37 and byte(pattern, p + 1)
    if after == 98 then
      s = match_balance(m, s, p + 2)
      if not s then break end
      p = p + 4
    elseif after == 102 then
      p = p + 2
      if byte(pattern, p) ~= 91 then error("missing '[' after '%f' in pattern", 0) end
      local stop = class_end(m, p)
      local set = class_set(m, p, stop)
      if set[byte(text, s - 1) or 0] or not set[byte(text, s) or 0] then break end
      p = stop
    elseif after and after >= 48 and after <= 57 then
      s = back_reference(m, s, after)
      if not s then break end
      p = p + 2
    else
      local stop = class_end(m, p)
      local set = class_set(m, p, stop)
      local quantity = byte(pattern, stop)
      if quantity == 63 then
        if s <= #text and set[byte(text, s)] then
          result = match(m, s + 1, stop + 1)
          if result then break end
        end
        p = stop + 1
      elseif quantity == 42 or quantity == 43 then
        local last = s
        while last <= #text and set[byte(text, last)] do last = last + 1 end
        for at = last, quantity == 43 and s + 1 or s, -1 do
          result = match(m, at, stop + 1)
          if result then break end
        end
        break
      elseif quantity == 45 then
        while true do
          result = match(m, s, stop + 1)
          if result or not (s <= #text and set[byte(text, s)]) then break end
          s = s + 1
        end
        break
      else
        if not (s <= #text and set[byte(text, s)]) then break end
        s, p = s + 1, stop
      end
    end
  end
  m.depth = m.depth - 1
  return result
end

local function counted_find(text, pattern, init)
  local is_anchored = byte(pattern, 1) == 94
  local m = { text = text, pattern = pattern, sets = {}, from = {}, length = {}, level = 0, depth = 0 }
  local from = is_anchored and 2 or 1
  for start = init, is_anchored and init or #text + 1 do
    m.level, m.depth = 0, 0
    local stop = match(m, start, from)
    if stop then
      local captures = {}
      for index = 1, m.level do captures[index] = capture_text(m, index) end
      return start, stop - 1, unpack(captures, 1, m.level)
    end
  end
  return nil
end

--- Like string.find without `plain`, from the position `init` (1 to #text + 1).
local function bounded_find(text, pattern, init)
  if is_cheap(text, pattern) then return find(text, pattern, init) end
  return counted_find(text, pattern, init)
end

local function start_of(text, init)
  if init > 0 then return init end
  if init == 0 then return 1 end
  if init < -#text then return 1 end
  return #text + init + 1
end

function patterns.find(text, pattern, init, plain)
  local start = start_of(text, init)
  if start > #text + 1 then return nil end
  if plain or not find(pattern, "[%^%$%*%+%?%.%(%[%%%-]") then return find(text, pattern, start, true) end
  return bounded_find(text, pattern, start)
end

local function captured(text, start, stop, ...)
  if not start then return nil end
  if ... == nil then return sub(text, start, stop) end
  return ...
end

function patterns.match(text, pattern, init)
  local start = start_of(text, init)
  if start > #text + 1 then return nil end
  return captured(text, bounded_find(text, pattern, start))
end

function patterns.gmatch(text, pattern, init)
  if byte(pattern, 1) == 94 then pattern = "%" .. pattern end
  local at, last = start_of(text, init), nil
  local function answer(start, stop, ...)
    if not start then
      at = #text + 2
      return nil
    end
    at, last = stop + 1, stop + 1
    return captured(text, start, stop, ...)
  end
  local function step(start, stop, ...)
    if start and stop + 1 == last then  -- an empty match where the last one ended
      if start + 1 > #text + 1 then return answer(nil) end
      return answer(bounded_find(text, pattern, start + 1))
    end
    return answer(start, stop, ...)
  end
  return function()
    if at > #text + 1 then return nil end
    return step(bounded_find(text, pattern, at))
  end
end

local function expand(replacement, text, start, stop, captures, count)
  return (gsub(replacement, "%%(.?)", function(code)
    if code == "%" then return "%" end
    if code == "0" then return sub(text, start, stop) end
    if code == "" or not find(code, "%d") then
      error("invalid use of '%' in replacement string", 0)
    end
    local index = byte(code) - 48
    if index == 1 and count == 0 then return sub(text, start, stop) end
    if index > count then error("invalid capture index %" .. index .. " in replacement string", 0) end
    return tostring(captures[index])
  end))
end

local function replaced(replacement, kind, text, start, stop, ...)
  local count = raw.select("#", ...)
  local value
  if kind == "string" then
    return expand(replacement, text, start, stop, { ... }, count)
  elseif kind == "table" then
    if count > 0 then value = replacement[(...)] else value = replacement[sub(text, start, stop)] end
  elseif count > 0 then
    value = replacement(...)
  else
    value = replacement(sub(text, start, stop))
  end
  if not value then return sub(text, start, stop) end
  if type(value) == "string" then return value end
  if type(value) == "number" then return tostring(value) end
  error("invalid replacement value (a " .. type(value) .. ")", 0)
end

function patterns.gsub(text, pattern, replacement, count_max)
  local kind = type(replacement)
  if kind == "string" and is_cheap(text, pattern) then return gsub(text, pattern, replacement, count_max) end
  local is_anchored = byte(pattern, 1) == 94
  local pieces, count, done, at, last = {}, 0, 0, 1, nil
  local function take(start, stop, ...)
    if not start then return false end
    if stop + 1 == last then return true, start end
    pieces[count + 1] = sub(text, at, start - 1)
    at, last, done = stop + 1, stop + 1, done + 1
    pieces[count + 2] = replaced(replacement, kind, text, start, stop, ...)
    count = count + 2
    return true
  end
  while done < count_max do
    local is_found, again = take(bounded_find(text, pattern, at))
    if again then
      if again > #text then break end
      pieces[count + 1] = sub(text, at, again)
      count, at = count + 1, again + 1
    elseif not is_found or is_anchored then
      break
    end
    if at > #text + 1 then break end
  end
  pieces[count + 1] = sub(text, at)
  return concat(pieces), done
end

return patterns
