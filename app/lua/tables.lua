-- The table library: plain tables go to C, those with a metatable are walked here, so that metamethods may perform
-- operations and no C function runs long unseen.
local raw, part = ...
local charge, limits, expected = part.charge, part.limits, part.expected
local text_of, integer_of = part.text_of, part.integer_of
local type, error, select, format = raw.type, raw.error, raw.select, raw.string.format
local rawlen, rawequal, raw_getmetatable, math_type = raw.rawlen, raw.rawequal, raw.debug.getmetatable, raw.math.type
local concat, sort, insert, remove = raw.table.concat, raw.table.sort, raw.table.insert, raw.table.remove
local unpack, move = raw.table.unpack, raw.table.move

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
      local is_other = kind == "string" and type(value) ~= "string"
        or kind ~= "string" and (math_type(value) ~= kind or value ~= value)
      if is_other then
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

return tables
