-- Values between Lua and JSON, the errors that programs see, and schemas: what a field may hold.
--
-- Called with `host` (the child's own functions) and `lang` (what the parts of the language share).

local host, lang = ...
local null = host.null
local is_array = host.is_array
local LEVELS_MAX = 64

-- ------------------------------------------------------------------------------------------------------------- errors

local Raised = {__name = "error"}
Raised.__index = Raised
Raised.__tostring = function(self) return self.message end
Raised.__concat = function(a, b) return tostring(a) .. tostring(b) end
Raised.__metatable = "error"

-- Raise an error that says its type, and where in the program it happened. What the host has recorded of an operation
-- is raised by `lang.raise` as it is.
function lang.fail(kind, message, where)
    local chunk, line = host.here()
    if chunk then message = chunk .. ":" .. line .. ": " .. message end
    error(setmetatable({type = kind, message = message, where = where, retryable = false}, Raised), 0)
end

function lang.raise(said)
    error(setmetatable(said, Raised), 0)
end

-- What the libraries refuse in strict mode.
function host.refuse(message)
    lang.raise({type = "RUN_NOT_DETERMINISTIC", message = message, retryable = false})
end

local function invalid(where, message)
    lang.fail("RUN_VALUE_INVALID", where .. ": " .. message, where)
end
lang.invalid = invalid

-- -------------------------------------------------------------------------------------------------------------- tables

-- Whether a plain table is a list: the host said so, or it has the keys 1 to n and no others. An empty one is none.
function lang.is_list(value)
    if is_array(value) then return true end
    local length = #value
    if length == 0 then return false end
    local count = 0
    for key in next, value do
        if math.type(key) ~= "integer" or key < 1 or key > length then return false end
        count = count + 1
    end
    return count == length
end

-- What came from the host, as programs see it: a member that is null is not there; an item that is null stays `null`.
local function seen(value)
    if value == null then return nil end
    if type(value) ~= "table" then return value end
    local is_list = is_array(value)
    for key, item in next, value do
        if item == null then
            if not is_list then value[key] = nil end
        elseif type(item) == "table" then
            seen(item)
        end
    end
    return value
end
lang.seen = seen

-- A copy of a program's value as JSON data; `where` names it if it has none. Parts of the state are copied.
local function plain(value, where, level)
    local kind = type(value)
    if kind == "nil" or value == null then return null end
    if kind == "number" then
        if value ~= value or value == math.huge or value == -math.huge then
            invalid(where, "expected a finite number, found " .. tostring(value))
        end
        local whole = math.tointeger(value)
        if whole and (whole > 9007199254740991 or whole < -9007199254740991) then
            invalid(where, "expected a number up to 2^53-1, found " .. tostring(value))
        end
        return whole or value
    end
    if kind == "boolean" or kind == "string" then return value end
    if kind ~= "table" then
        invalid(where, "expected text, a number, true, false or a table of these, found a " .. kind)
    end
    level = level or 1
    if level > LEVELS_MAX then
        invalid(where, "tables stand in one another more than " .. LEVELS_MAX .. " deep, or in themselves")
    end
    local node = lang.node_of(value)
    if node then return lang.exported(node) end
    local readable = lang.readable(value) or lang.readable_global(value)
    if readable then return plain(readable, where, level) end
    local made = {}
    if lang.is_list(value) then
        for index = 1, #value do made[index] = plain(value[index], where .. "[" .. index .. "]", level + 1) end
        return host.array(made)
    end
    for key, item in next, value do
        if type(key) ~= "string" then
            invalid(where, "a table has either the keys 1 to n or text keys, found the key " .. tostring(key))
        end
        made[key] = plain(item, where .. "." .. key, level + 1)
    end
    return made
end
lang.plain = plain

-- A table that can be read and not changed: the input, and the tables in it.
local frozen = setmetatable({}, {__mode = "k"})

function lang.read_only(value, where)
    if type(value) ~= "table" then return value end
    local made = {}
    local proxy = setmetatable({}, {
        __index = function(_, key)
            local found = value[key]
            if type(found) ~= "table" then return found end
            if made[key] == nil then made[key] = lang.read_only(found, where .. "." .. tostring(key)) end
            return made[key]
        end,
        __newindex = function(_, key)
            invalid(where .. "." .. tostring(key), "the input is read-only: keep a changed copy in a local, or in state")
        end,
        __len = function() return #value end,
        __pairs = function(self)
            local keys, place = lang.sorted_keys(value), 0
            return function()
                place = place + 1
                if keys[place] ~= nil then return keys[place], self[keys[place]] end
            end
        end,
        __metatable = "input",
    })
    frozen[proxy] = value
    return proxy
end

function lang.readable(value) return frozen[value] end

-- The keys of a table in an order that does not depend on addresses: numbers first, then texts.
function lang.sorted_keys(value)
    local keys = {}
    for key in next, value do keys[#keys + 1] = key end
    table.sort(keys, function(a, b)
        local first, second = type(a), type(b)
        if first == second then return a < b end
        return first == "number"
    end)
    return keys
end

-- ------------------------------------------------------------------------------------------------------------- schemas

local TYPES = {string = true, number = true, integer = true, boolean = true, array = true, table = true, object = true,
    any = true}
local OTHER_NAMES = {text = "string", list = "array", int = "integer", float = "number", bool = "boolean"}

local function found_type(value)
    local kind = type(value)
    if kind == "nil" or value == null then return "nothing" end
    if kind == "table" then return lang.is_list(value) and "array" or "table" end
    if kind == "string" then
        return string.format("%q", #value > 60 and string.sub(value, 1, 60) .. "..." or value)
    end
    return kind .. " " .. tostring(value)
end

local field_of

-- The fields of a schema as an author wrote them, checked: {name = {type=, required=, default=, enum=, ...}}.
function lang.fields(said, where)
    if said == nil then return nil end
    if type(said) ~= "table" then
        lang.fail("PROCEDURE_SOURCE_INVALID", where .. ": expected a table of fields, found " .. found_type(said))
    end
    local fields = {}
    for _, name in ipairs(lang.sorted_keys(said)) do
        fields[name] = field_of(said[name], where .. "." .. tostring(name), name)
    end
    return fields
end

function field_of(said, where, name)
    if type(name) ~= "string" then
        lang.fail("PROCEDURE_SOURCE_INVALID", where .. ": a field has a name: name = {type = \"string\"}")
    end
    if type(said) == "string" then said = {type = said} end
    if type(said) ~= "table" then
        lang.fail("PROCEDURE_SOURCE_INVALID",
            where .. ": expected {type = \"string\", ...} or field.string{...}, found " .. found_type(said))
    end
    local kind = said.type or "any"
    kind = OTHER_NAMES[kind] or kind
    if not TYPES[kind] then
        lang.fail("PROCEDURE_SOURCE_INVALID", where .. ".type: expected string, number, integer, boolean, array, table "
            .. "or any, found " .. tostring(kind))
    end
    local field = {type = kind, required = said.required == true, description = said.description}
    if said.enum ~= nil then field.enum = plain(said.enum, where .. ".enum") end
    if said.items ~= nil then field.items = field_of(said.items, where .. ".items", "items") end
    if said.properties ~= nil or said.fields ~= nil then
        field.properties = lang.fields(said.properties or said.fields, where)
    end
    if said.default ~= nil then
        field.default = lang.checked(field, said.default, where .. ".default")
    end
    return field
end

-- The value as JSON data, if the field may hold it; else an error that names the place.
function lang.checked(field, value, where)
    local made = plain(value, where)
    if made == null then
        if field.required then invalid(where, "is required, found nothing") end
        return nil
    end
    local kind, found = field.type, type(made)
    if found == "table" and next(made) == nil and kind == "array" then made = host.array(made) end
    local fits = kind == "any" or (kind == "number" and found == "number") or (kind == "string" and found == "string")
        or (kind == "boolean" and found == "boolean") or (kind == "integer" and math.type(made) == "integer")
        or (found == "table" and (kind == "table" or (lang.is_list(made) == (kind == "array")
            and (kind == "array" or kind == "object"))))
    if not fits then invalid(where, "expected " .. kind .. ", found " .. found_type(made)) end
    if field.enum then
        local is_one, names = false, {}
        for index, one in ipairs(field.enum) do
            is_one = is_one or one == made
            names[index] = tostring(one)
        end
        if not is_one then
            invalid(where, "expected one of " .. table.concat(names, ", ") .. ", found " .. found_type(made))
        end
    end
    if field.items and found == "table" and lang.is_list(made) then
        for index = 1, #made do made[index] = lang.checked(field.items, made[index], where .. "[" .. index .. "]") or null end
    end
    if field.properties and found == "table" and not lang.is_list(made) then
        return lang.checked_fields(field.properties, made, where, true)
    end
    return made
end

-- An object by its fields, with defaults filled in. `is_open`: members that no field names are let through.
function lang.checked_fields(fields, value, where, is_open)
    local made = plain(value == nil and {} or value, where)
    if type(made) ~= "table" or (lang.is_list(made) and #made > 0) then
        invalid(where, "expected a table of fields, found " .. found_type(made))
    end
    if fields == nil then return made end
    local checked = {}
    for _, name in ipairs(lang.sorted_keys(fields)) do
        local field, found = fields[name], made[name]
        if found == nil or found == null then found = field.default end
        checked[name] = lang.checked(field, found, where .. "." .. name)
    end
    for _, name in ipairs(lang.sorted_keys(made)) do
        if fields[name] == nil then
            if not is_open then
                invalid(where .. "." .. name, "no such field; declared are " .. lang.names(fields))
            end
            checked[name] = made[name]
        end
    end
    return checked
end

function lang.names(fields)
    local names = lang.sorted_keys(fields)
    return #names > 0 and table.concat(names, ", ") or "none"
end
