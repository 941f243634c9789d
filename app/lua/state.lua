-- The state of a run: a tree of nodes. Programs see proxies, and every change is kept as the worker protocol writes it,
-- so an append to a long list is one change. The parent has the truth: what it changes by itself (a replay that brings
-- what a recorded body did, a failed body that is rolled back) is applied here with `lang.apply`.
--
-- What is assigned is copied. A part that was replaced can be read, and changing it is refused.

local host, lang = ...
local null = host.null
local POINTER_MAX = 256

local nodes = setmetatable({}, {__mode = "k"}) -- by proxy

function lang.node_of(value) return nodes[value] end

local function is_node(value) return type(value) == "table" and value ~= null end

-- JSON data as nodes: scalars stay what they are. `is_any`: an empty table may yet become a list.
local function grown(store, value, up, key)
    if not is_node(value) then return value end
    local is_list = lang.is_list(value)
    local node = {store = store, up = up, key = key, data = {}, is_list = is_list, n = is_list and #value or 0}
    for name, item in next, value do
        if item ~= null or is_list then node.data[name] = grown(store, item, node, name) end
    end
    return node
end

local function exported(node)
    if not is_node(node) then
        if node == nil then return null end
        return node
    end
    local made = {}
    if node.is_list then
        for index = 1, node.n do made[index] = exported(node.data[index]) end
        return host.array(made)
    end
    for name, item in next, node.data do made[name] = exported(item) end
    return made
end
lang.exported = exported

-- A state of its own, with this content; none is pending.
function lang.new_store(content)
    local store = {log = {}}
    store.root = grown(store, content or {}, nil, nil)
    return store
end

-- ------------------------------------------------------------------------------------------------------------- changes

local function escaped(part)
    if type(part) == "number" then return string.format("%d", part - 1) end
    if not string.find(part, "[~/]") then return part end
    return (string.gsub(string.gsub(part, "~", "~0"), "/", "~1"))
end

local function pointer(node, last)
    local parts = {last}
    while node.up do
        table.insert(parts, 1, escaped(node.key))
        node = node.up
    end
    return "/" .. table.concat(parts, "/")
end

-- As messages name it: state.items[3].name
local function place(node, key)
    local text = type(key) == "number" and "[" .. key .. "]" or key and "." .. tostring(key) or ""
    while node.up do
        text = (type(node.key) == "number" and "[" .. node.key .. "]" or "." .. node.key) .. text
        node = node.up
    end
    return "state" .. text
end
lang.place = place

local function record(store, node, op, key, to, is_append)
    local at = pointer(node, is_append and "-" or escaped(key))
    if #at > POINTER_MAX or string.find(at, "%c") then
        while node.up and #pointer(node.up, escaped(node.key)) > POINTER_MAX do node = node.up end
        if not node.up then
            store.log[#store.log + 1] = {op = "set", at = "", to = exported(store.root)}
        else
            store.log[#store.log + 1] = {op = "set", at = pointer(node.up, escaped(node.key)), to = exported(node)}
        end
        store.last = nil
        return
    end
    local last = store.last
    if last and op == "set" and not is_append and last.node == node and last.key == key then
        last.change.to = to -- set twice in a row is set once
        return
    end
    local change = {op = op, at = at, to = to}
    store.log[#store.log + 1] = change
    store.last = op == "set" and not is_append and {node = node, key = key, change = change} or nil
end

-- The changes since the last time, for the parent.
function lang.taken(store)
    local log = store.log
    if #log == 0 then return nil end
    store.log, store.last = {}, nil
    return host.array(log)
end

-- ------------------------------------------------------------------------------------------------------------- proxies

local function verify_there(node, key)
    if node.store ~= lang.current.store then
        lang.invalid(place(node, key), "belongs to the state of another branch: read it from state here")
    end
    local one = node
    while one.up do
        if one.up.data[one.key] ~= one then
            lang.invalid(place(node, key), "was removed or replaced: read it from state again before changing it")
        end
        one = one.up
    end
    if one ~= node.store.root then
        lang.invalid(place(node, key), "was removed or replaced: read it from state again before changing it")
    end
end

local function item_field(node)
    return node.field and node.field.items
end

local function field_for(node, key)
    if node.is_list then return item_field(node) end
    local fields = node.fields or (node.field and node.field.properties)
    return fields and fields[key]
end

local proxy_of

local function read(node, key)
    local found = node.data[key]
    if is_node(found) then
        if found.field == nil then found.field = field_for(node, key) end
        return proxy_of(found)
    end
    return found
end

-- An empty table that nothing calls a list becomes one when its first item comes.
local function become_list(node)
    node.is_list, node.n = true, 0
end

local function put(node, key, made)
    if made == nil then
        node.data[key] = nil
    else
        node.data[key] = grown(node.store, made, node, key)
    end
end

local function write_item(node, key, value)
    local where = place(node, key)
    if math.type(key) ~= "integer" then
        if math.type(key) == "float" and math.tointeger(key) then key = math.tointeger(key) else
            lang.invalid(where, "a list has the keys 1 to n, found " .. tostring(key))
        end
    end
    if value == nil then
        if key == node.n then
            node.n = node.n - 1
            node.data[key] = nil
            record(node.store, node, "remove", key)
        elseif key >= 1 and key < node.n then
            lang.invalid(where, "a list has no holes: use table.remove(list, " .. key .. ")")
        end
        return
    end
    if key < 1 or key > node.n + 1 then
        lang.invalid(where, "a list has no holes: it has " .. node.n .. " items, so the next is " .. node.n + 1)
    end
    local field = item_field(node)
    local made = field and lang.checked(field, value, where) or lang.plain(value, where)
    put(node, key, made)
    if key > node.n then
        node.n = key
        record(node.store, node, "set", key, made, true)
    else
        record(node.store, node, "set", key, made)
    end
end

local function write_member(node, key, value)
    local where = place(node, key)
    if type(key) ~= "string" then
        if math.type(key) == "integer" and key == 1 and next(node.data) == nil and node.up and value ~= nil then
            become_list(node)
            local made = lang.plain(value, where)
            put(node, 1, made)
            node.n = 1
            local up, name = node.up, node.key
            record(node.store, up, "set", name, exported(node))
            return
        end
        lang.invalid(where, "a table in state has either the keys 1 to n or text keys, found " .. tostring(key))
    end
    local fields = node.fields
    if fields and fields[key] == nil then
        lang.invalid(where, "no such field of the state; declared are " .. lang.names(fields))
    end
    local field, made = field_for(node, key), nil
    if field then
        made = lang.checked(field, value, where)
    elseif value ~= nil then
        made = lang.plain(value, where)
    end
    if made == nil or made == null then
        if node.data[key] == nil then return end
        node.data[key] = nil
        record(node.store, node, "remove", key)
        return
    end
    put(node, key, made)
    record(node.store, node, "set", key, made)
end

local function write(node, key, value)
    verify_there(node, key)
    if node.is_list then write_item(node, key, value) else write_member(node, key, value) end
end

local function pairs_of(node, proxy)
    if node.is_list then
        local index = 0
        return function()
            index = index + 1
            if index <= node.n then return index, read(node, index) end
        end, proxy, nil
    end
    local keys, at = lang.sorted_keys(node.data), 0
    return function()
        at = at + 1
        while keys[at] ~= nil and node.data[keys[at]] == nil do at = at + 1 end
        if keys[at] ~= nil then return keys[at], read(node, keys[at]) end
    end, proxy, nil
end

local Proxy = {__metatable = "state", __name = "state"}
Proxy.__index = function(self, key) return read(nodes[self], key) end
Proxy.__newindex = function(self, key, value) write(nodes[self], key, value) end
Proxy.__len = function(self) return nodes[self].n end
Proxy.__pairs = function(self) return pairs_of(nodes[self], self) end

function proxy_of(node)
    if node.proxy == nil then
        node.proxy = setmetatable({}, Proxy)
        nodes[node.proxy] = node
    end
    return node.proxy
end

-- The global `state`: that of the procedure that runs at this moment, of the branch that runs at this moment.
local function root()
    local frame = lang.current
    local node = frame.store.root
    if frame.state_key then node = node.data[frame.state_key] end
    node.fields = frame.state_fields
    return node
end

lang.state = setmetatable({}, {
    __index = function(_, key)
        lang.verify_running("state." .. tostring(key))
        return read(root(), key)
    end,
    __newindex = function(_, key, value)
        lang.verify_running("state." .. tostring(key))
        write(root(), key, value)
    end,
    __len = function() return 0 end,
    __pairs = function(self) return pairs_of(root(), self) end,
    __metatable = "state",
})

-- Set a member of the whole state, whatever the fields of the procedure that runs are.
function lang.write_root(node, key, value)
    node.fields = nil
    write(node, key, value)
end

-- The whole state as data, where a program hands it on: `context = state`.
function lang.whole_state() return exported(root()) end

-- ---------------------------------------------------------------------------------------------- what the parent changes

local function unescaped(step) return (string.gsub(string.gsub(step, "~1", "/"), "~0", "~")) end

local function filled(node, value)
    node.data, node.is_list, node.n = {}, lang.is_list(value), 0
    if node.is_list then node.n = #value end
    for name, item in next, value do
        if item ~= null or node.is_list then node.data[name] = grown(node.store, item, node, name) end
    end
end

local function renumber(node, first)
    for index = first, node.n do
        if is_node(node.data[index]) then node.data[index].key = index end
    end
end

local function apply_one(store, change)
    local at, to = change.at, change.to
    if at == "" then return filled(store.root, to) end
    local node, steps = store.root, {}
    for step in string.gmatch(at, "/([^/]*)") do steps[#steps + 1] = unescaped(step) end
    for index = 1, #steps - 1 do
        node = node.data[node.is_list and math.tointeger(steps[index]) + 1 or steps[index]]
    end
    local last = steps[#steps]
    if not node.is_list then
        local found = node.data[last]
        if change.op == "remove" or to == null then
            node.data[last] = nil
        elseif is_node(found) and is_node(to) and (found.is_list == lang.is_list(to) or next(to) == nil) then
            filled(found, to)
        else
            node.data[last] = grown(store, to, node, last)
        end
        return
    end
    local index = last == "-" and node.n + 1 or math.tointeger(last) + 1
    if change.op == "remove" then
        table.remove(node.data, index)
        node.n = node.n - 1
        renumber(node, index)
    elseif change.op == "insert" then
        table.insert(node.data, index, grown(store, to, node, index))
        node.n = node.n + 1
        renumber(node, index)
    else
        node.data[index] = grown(store, to, node, index)
        if index > node.n then node.n = index end
    end
end

function lang.apply(store, changes)
    store.last = nil
    for _, change in ipairs(changes) do apply_one(store, change) end
end
