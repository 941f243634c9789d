-- JSON in and out of a Lua state: the only form in which anything crosses its border.
-- A number without a fraction is an integer in both directions, so that a replayed value equals the live one.
local raw = ...
local byte, char, find, sub = raw.string.byte, raw.string.char, raw.string.find, raw.string.sub
local format = raw.string.format
local gsub, concat, sort, rawnext, rawlen = raw.string.gsub, raw.table.concat, raw.table.sort, raw.next, raw.rawlen
local type, tonumber, error, utf8_char, utf8_len = raw.type, raw.tonumber, raw.error, raw.utf8.char, raw.utf8.len
local math_type, getmetatable, setmetatable = raw.math.type, raw.debug.getmetatable, raw.setmetatable
local rawget, floor, huge = raw.rawget, raw.math.floor, raw.math.huge

local SAFE_INTEGER_MAX <const> = 9007199254740991
local KEYS_MAX <const> = 9000
local codec = { depth_max = 56, unwrap = false }
local keys_left = KEYS_MAX

local arrays = setmetatable({}, { __mode = "k" })
local null = setmetatable({}, {
  __tostring = function() return "null" end,
  __name = "null",
  __metatable = false,
  __newindex = function() error("null has no fields", 2) end,
})
codec.null = null

function codec.array(items)
  if type(items) ~= "table" then error("expected a table to mark as an array, found " .. type(items), 2) end
  arrays[items] = true
  return items
end

function codec.is_array(value)
  return type(value) == "table" and arrays[value] == true
end

-- Decoding. The text comes from the gateway and is JSON; what is not is refused all the same.
local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/" }
local decode_value

local function broken(text, at)
  error(format("expected JSON at byte %d of %d", at, #text), 0)
end

local function unescape_unicode(text)
  text = gsub(text, "\\u([dD][89abAB]%x%x)\\u([dD][c-fC-F]%x%x)", function(high, low)
    return utf8_char(0x10000 + (tonumber(high, 16) - 0xD800) * 0x400 + tonumber(low, 16) - 0xDC00)
  end)
  return text
end

local function decode_string(text, at)
  local from = at + 1
  local stop = find(text, '["\\]', from)
  if not stop then broken(text, at) end
  if byte(text, stop) == 34 then return sub(text, from, stop - 1), stop + 1 end
  local pieces, count = {}, 0
  while true do
    count = count + 1
    pieces[count] = sub(text, from, stop - 1)
    if byte(text, stop) == 34 then return concat(pieces), stop + 1 end
    local escape = sub(text, stop + 1, stop + 1)
    count = count + 1
    if escape == "u" then
      local pair = sub(text, stop, stop + 11)
      local plain = unescape_unicode(pair)
      if plain ~= pair then
        pieces[count] = plain
        from = stop + 12
      else
        local code = tonumber(sub(text, stop + 2, stop + 5), 16)
        if not code then broken(text, stop) end
        pieces[count] = utf8_char(code)
        from = stop + 6
      end
    else
      pieces[count] = ESCAPES[escape] or broken(text, stop)
      from = stop + 2
    end
    stop = find(text, '["\\]', from)
    if not stop then broken(text, at) end
  end
end

local function decode_number(text, at)
  local _, stop = find(text, "^-?%d+%.?%d*[eE]?[+-]?%d*", at)
  local number = stop and tonumber(sub(text, at, stop))
  if not number then broken(text, at) end
  if math_type(number) == "float" and floor(number) == number and number <= SAFE_INTEGER_MAX
    and number >= -SAFE_INTEGER_MAX then
    number = number // 1 | 0
  end
  return number, stop + 1
end

local function decode_array(text, at)
  local items, count = {}, 0
  arrays[items] = true
  at = find(text, "[^ \n\r\t]", at + 1)
  if byte(text, at or -1) == 93 then return items, at + 1 end
  while true do
    count = count + 1
    items[count], at = decode_value(text, at)
    at = find(text, "[^ \n\r\t]", at)
    local mark = at and byte(text, at)
    if mark == 93 then return items, at + 1 end
    if mark ~= 44 then broken(text, at or #text) end
    at = at + 1
  end
end

local function decode_object(text, at)
  local members = {}
  at = find(text, "[^ \n\r\t]", at + 1)
  if byte(text, at or -1) == 125 then return members, at + 1 end
  while true do
    at = find(text, "[^ \n\r\t]", at)
    if not at or byte(text, at) ~= 34 then broken(text, at or #text) end
    local name
    name, at = decode_string(text, at)
    at = find(text, "[^ \n\r\t]", at)
    if not at or byte(text, at) ~= 58 then broken(text, at or #text) end
    members[name], at = decode_value(text, at + 1)
    at = find(text, "[^ \n\r\t]", at)
    local mark = at and byte(text, at)
    if mark == 125 then return members, at + 1 end
    if mark ~= 44 then broken(text, at or #text) end
    at = at + 1
  end
end

function decode_value(text, at)
  at = find(text, "[^ \n\r\t]", at)
  local mark = at and byte(text, at)
  if mark == 34 then return decode_string(text, at) end
  if mark == 123 then return decode_object(text, at) end
  if mark == 91 then return decode_array(text, at) end
  if mark == 116 and sub(text, at, at + 3) == "true" then return true, at + 4 end
  if mark == 102 and sub(text, at, at + 4) == "false" then return false, at + 5 end
  if mark == 110 and sub(text, at, at + 3) == "null" then return null, at + 4 end
  if mark then return decode_number(text, at) end
  broken(text, #text)
end

function codec.decode(text)
  local value, at = decode_value(text, 1)
  if find(text, "[^ \n\r\t]", at) then broken(text, at) end
  return value
end

-- Encoding. Keys are sorted: the same value is the same text in every process.
local QUOTES = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }
for code = 0, 31 do
  local control = char(code)
  QUOTES[control] = QUOTES[control] or format("\\u%04x", code)
end
local encode_value

local function refuse(path, text)
  error(format("%s cannot leave the program: %s", path, text), 0)
end

local function encode_string(value, path)
  if find(value, "[\128-\255]") and not utf8_len(value) then
    refuse(path, "expected text in UTF-8, found bytes that are not. Encode them, in hexadecimal for instance")
  end
  if find(value, "\0", 1, true) then refuse(path, "expected text, found a NUL in it. Encode it") end
  if find(value, '[%c"\\]') then value = gsub(value, '[\1-\31"\\]', QUOTES) end
  return '"' .. value .. '"'
end

local function encode_number(value, path)
  if value ~= value or value == huge or value == -huge then
    refuse(path, "expected a finite number, found " .. (value ~= value and "nan" or value > 0 and "inf" or "-inf"))
  end
  if value > SAFE_INTEGER_MAX or value < -SAFE_INTEGER_MAX then
    refuse(path, format("expected a number from -2^53+1 to 2^53-1, found %.17g. Send it as a string", value))
  end
  if math_type(value) == "integer" then return format("%d", value) end
  if floor(value) == value then return format("%d", value) end
  local text = format("%.15g", value)
  if tonumber(text) ~= value then text = format("%.17g", value) end
  return text
end

local function array_length(items, path)
  local count = rawlen(items)
  local found = 0
  for key in rawnext, items do
    found = found + 1
    if math_type(key) ~= "integer" or key < 1 or key > count then
      refuse(path, "expected an array without gaps and without other keys, found the key " ..
        (type(key) == "string" and key or type(key) == "number" and format("%.14g", key) or "that is a " .. type(key)))
    end
  end
  if found ~= count then refuse(path, format("expected an array without gaps, found %d of %d items", found, count)) end
  return count
end

local function encode_table(value, path, depth)
  if value == null then return "null" end
  if depth > codec.depth_max then
    refuse(path, format("expected at most %d levels, found more, or a table inside itself", codec.depth_max))
  end
  if codec.unwrap and getmetatable(value) then value = codec.unwrap(value) end
  local is_array = arrays[value]
  local count = (is_array or rawlen(value) > 0) and array_length(value, path)
  local pieces = {}
  if count then
    for index = 1, count do
      pieces[index] = encode_value(rawget(value, index), path .. "[" .. index .. "]", depth + 1)
    end
    return "[" .. concat(pieces, ",") .. "]"
  end
  local names, found = {}, 0
  for name in rawnext, value do
    if type(name) ~= "string" then
      refuse(path, "expected names of fields to be strings, found a " .. type(name) ..
        (type(name) == "number" and " (" .. format("%.14g", name) .. ")" or ""))
    end
    found = found + 1
    names[found] = name
  end
  keys_left = keys_left - found
  if keys_left < 0 then refuse(path, format("expected at most %d named fields, found more", KEYS_MAX)) end
  sort(names)
  for index = 1, found do
    local name = names[index]
    local written = encode_value(rawget(value, name), path .. "." .. name, depth + 1)
    pieces[index] = encode_string(name, path) .. ":" .. written
  end
  return "{" .. concat(pieces, ",") .. "}"
end

function encode_value(value, path, depth)
  local kind = type(value)
  if kind == "string" then return encode_string(value, path) end
  if kind == "number" then return encode_number(value, path) end
  if kind == "boolean" then return value and "true" or "false" end
  if kind == "nil" then return "null" end
  if kind == "table" then return encode_table(value, path, depth) end
  refuse(path, "expected a JSON value, found a " .. kind)
end

function codec.encode(value, what)
  keys_left = KEYS_MAX
  return encode_value(value, what or "the value", 1)
end

return codec
