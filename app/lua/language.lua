-- The language of Lua procedures, as programs see it. What it performs is done by the parent: `call` hands over a
-- request and the changes of the state so far, and comes back with what is recorded.
--
-- A frame is what runs at this moment: a thread of its own for the program, for each body of an operation and for each
-- branch. Threads change only where one of them waits for the parent, so `lang.current` is set there.

local host, lang = ...
local env, null = host.env, host.null
local Stopped = {} -- thrown where a source is only declared and would begin to work

lang.mode = "declare"
lang.current = nil
lang.procedures, lang.order = {}, {}
lang.uses = {tools = {}, models = {}, agents = {}}
lang.agents = {}

-- -------------------------------------------------------------------------------------------------------------- frames

local function new_frame(around, changes)
    local frame = {
        store = around and around.store,
        state_key = around and around.state_key,
        state_fields = around and around.state_fields,
        input = around and around.input,
        step = around and around.step,
        is_checkpoint = around and around.is_checkpoint or false,
        touched = {},
        counts = {},
        logs = {},
        around = around,
    }
    for name, value in next, changes or {} do frame[name] = value end
    return frame
end

local function enter(frame)
    lang.current = frame
    host.in_checkpoint(frame.is_checkpoint)
end

local function logs_of(frame)
    if #frame.logs == 0 then return nil end
    local logs = frame.logs
    frame.logs = {}
    return host.array(logs)
end

-- Hand a request to the parent, and wait. Not for programs: what it raises is what the parent has recorded.
local function call(request)
    local frame = lang.current
    local chunk, line = host.here()
    -- `return Human.approve{...}` is a tail call: Lua has dropped the frame that called, and its line with it.
    if chunk == nil and frame.fn then chunk, line = host.beginning(frame.fn) end
    request.source = chunk and chunk .. ":" .. line or nil
    request.changes = lang.taken(frame.store)
    request.logs = logs_of(frame)
    local reply = host.call(request)
    enter(frame)
    local changes = reply.state
    if changes ~= nil and changes ~= null then lang.apply(frame.store, changes) end
    return reply
end

local function result(reply)
    if reply.error ~= nil and reply.error ~= null then lang.raise(lang.seen(reply.error)) end
    return lang.seen(reply.value)
end

-- A question that is answered from what the parent has, and is no operation: nothing is recorded.
function lang.ask(request) return result(call(request)) end

-- Whether the program runs; while a source is declared, this is where the declarations end.
function lang.verify_running(what)
    if lang.mode == "declare" then
        if lang.stopped_at == nil then
            local chunk, line = host.here()
            lang.stopped_at = {what = what, place = chunk and chunk .. ":" .. line .. ": " or ""}
        end
        error(Stopped, 0)
    end
end

-- ----------------------------------------------------------------------------------------------------- names, durations

-- The name of an operation that has none of its own: `research.agent_1` inside the step research.
local function auto_name(kind, outside)
    local frame = lang.current
    local count = (frame.counts[kind] or 0) + 1
    frame.counts[kind] = count
    if frame.step then return frame.step .. "." .. kind .. "_" .. count end
    return outside or "auto_" .. kind .. "_" .. count
end

local function scope_name(name)
    return string.sub((string.gsub(name, "[^%w._-]", "_")), 1, 40)
end

local UNITS = {ms = 0.001, s = 1, m = 60, min = 60, h = 3600, d = 86400, w = 604800}

-- Times are recorded with four digits of the year.
local LONGEST = 1000 * 365 * 86400

local function bounded(wanted, said, where)
    if wanted >= 0 and wanted <= LONGEST then return wanted end
    lang.invalid(where, "expected 0 seconds to 1000 years, found " .. tostring(said))
end

-- Seconds of 90, "90s", "24h" or "7d".
local function seconds(said, where)
    if said == nil or said == null then return nil end
    if type(said) == "number" then return bounded(said, said, where) end
    local number, unit = string.match(tostring(said), "^%s*(%d+%.?%d*)%s*(%a+)%s*$")
    if number == nil or UNITS[unit] == nil then
        lang.invalid(where, "expected seconds, or a text like \"30s\", \"15m\", \"24h\" or \"7d\", found "
            .. tostring(said))
    end
    return bounded(tonumber(number) * UNITS[unit], said, where)
end

local function options_of(said, where)
    if said == nil then return {} end
    if type(said) ~= "table" then lang.invalid(where, "expected a table of options, found a " .. type(said)) end
    return said
end

local function text_of(said, where)
    if type(said) ~= "string" or said == "" then lang.invalid(where, "expected text, found " .. tostring(said)) end
    return said
end

-- -------------------------------------------------------------------------------------------------------------- bodies

-- What agents and tools know of their last turn is put back when a body ends: in a replay its body does not run, and
-- the program must see the same then. What is to outlive a body goes into the state, or is returned.
local function touch(frame, thing)
    while frame do
        if frame.touched[thing] == nil then frame.touched[thing] = {output = thing.output, calls = thing.calls} end
        frame = frame.around
    end
end

local function restore(frame)
    for thing, before in next, frame.touched do thing.output, thing.calls = before.output, before.calls end
end

-- The first function of a body's thread.
local function begin(frame, fn, given)
    enter(frame)
    frame.fn = fn
    local value = fn(given)
    return {value = lang.plain(value, "the result"), changes = lang.taken(frame.store), logs = logs_of(frame)}
end

-- Perform an operation that has bodies: the parent asks for a thread when one is to run, and again for each retry. In a
-- replay it asks for none. `make(which)` gives a body's function and its frame.
local function perform(request, make)
    local made = {}
    local reply = call(request)
    while reply.spawn ~= nil do
        if reply.spawn == "flush" then
            -- A body has failed: the parent undoes what it did to the state, so it has to know of it.
            local frame = made[reply.thread]
            enter(frame)
            local changes, logs = lang.taken(frame.store), logs_of(frame)
            enter(frame.around)
            reply = call({op = "flushed", of_body = changes, body_logs = logs})
        else
            local fn, frame = make(reply.spawn)
            local thread = host.spawn(begin, frame, fn, lang.seen(reply.given))
            made[thread] = frame
            if frame.store ~= lang.current.store then frame.around = lang.current end
            reply = call({op = "spawned", thread = thread})
        end
    end
    for _, frame in next, made do restore(frame) end
    return result(reply)
end

local function retried(request, options, where)
    request.timeout = seconds(options.timeout, where .. ".timeout")
    local retry = options.retry or options.retries
    if retry ~= nil then
        if math.type(retry) == "integer" and retry >= 0 then
            request.retry = {retries = retry}
        elseif type(retry) == "table" then
            request.retry = {
                retries = retry.retries or retry.max or retry[1],
                first = seconds(retry.first, where .. ".retry.first"),
                factor = retry.factor,
                longest = seconds(retry.longest, where .. ".retry.longest"),
            }
        else
            lang.invalid(where .. ".retry", "expected a number of retries, or {retries = 3, first = \"1s\"}")
        end
    end
    return request
end

local function step(name, fn, options)
    if type(fn) ~= "function" then fn, options = options, fn end
    name = text_of(name, "the name of a step")
    if type(fn) ~= "function" then
        lang.invalid("step " .. name, "expected step(name, function() ... end), found a " .. type(fn))
    end
    lang.verify_running("step")
    options = options_of(options, "step " .. name)
    local request = retried({op = "step", name = name}, options, "step " .. name)
    request.at_most_once = options.at_most_once
    return perform(request, function()
        return fn, new_frame(lang.current, {step = scope_name(name), is_checkpoint = true, counts = {}})
    end)
end

-- checkpoint() saves the state; checkpoint(fn) runs fn once, and in a replay returns what it returned.
local function checkpoint(fn, options)
    if fn == nil or type(fn) == "string" and options == nil then
        lang.verify_running("checkpoint")
        return lang.ask({op = "checkpoint", name = fn or auto_name("checkpoint", "checkpoint")})
    end
    if type(fn) == "string" then return step(fn, options) end
    if type(fn) ~= "function" then
        lang.invalid("checkpoint", "expected checkpoint() or checkpoint(function() ... end), found a " .. type(fn))
    end
    lang.verify_running("checkpoint")
    options = options_of(options, "checkpoint")
    local request = retried({op = "step", name = options.name or auto_name("checkpoint")}, options, "checkpoint")
    return perform(request, function()
        return fn, new_frame(lang.current, {is_checkpoint = true, counts = {}})
    end)
end

local function parallel(name, branches)
    if type(name) == "table" then name, branches = nil, name end
    lang.verify_running("parallel")
    local names, fns = {}, {}
    local is_list = lang.is_list(branches)
    for place, key in ipairs(lang.sorted_keys(branches)) do
        if type(branches[key]) ~= "function" then
            lang.invalid("parallel", "expected functions, found a " .. type(branches[key]) .. " at " .. tostring(key))
        end
        names[place], fns[place] = key, branches[key]
    end
    local around = lang.current
    local found = perform({op = "gather", name = name or auto_name("parallel", "gather"), branches = #fns}, function(which)
        local store = lang.new_store(lang.exported(around.store.root))
        return fns[which], new_frame(around, {store = store, counts = {}})
    end)
    if is_list then return found end
    local by_name = {}
    for place, key in ipairs(names) do
        if found[place] ~= null then by_name[key] = found[place] end
    end
    return by_name
end

-- ---------------------------------------------------------------------------------------------------------- procedures

local Procedure = {__name = "procedure", __metatable = "procedure"}
Procedure.__index = function(self, key) return lang.procedures[self] and lang.procedures[self][key] end

local METADATA = {"description", "version", "author", "tags", "strict_determinism", "timeout", "checkpoint_timeout",
    "retry", "accepts"}

local function defaults(fields)
    local made, has_any = {}, false
    for _, name in ipairs(lang.sorted_keys(fields or {})) do
        if fields[name].default ~= nil then
            made[name] = lang.plain(fields[name].default, name)
            has_any = true
        end
    end
    return made, has_any
end

local function execute(this, frame)
    frame.input = lang.checked_fields(this.input, frame.given, "input")
    frame.input_proxy = lang.read_only(lang.seen(frame.input), "input")
    if type(this.run) ~= "function" then
        lang.fail("PROCEDURE_SOURCE_INVALID", "procedure " .. this.name .. " has no run = function() ... end")
    end
    frame.fn = this.run
    return lang.checked_output(this.output, this.run(env.input, env.state))
end

function lang.checked_output(fields, value)
    if fields == nil then return value end
    return lang.checked_fields(fields, value, "output", true)
end

Procedure.__call = function(self, given)
    local this = lang.procedures[self]
    lang.verify_running(this.name)
    local depth = (lang.current.depth or 0) + 1
    return perform({op = "call", name = this.name, given = lang.plain(given or {}, "the input of " .. this.name)}, function()
        local frame = new_frame(lang.current, {is_checkpoint = false, counts = {}, depth = depth, given = given})
        frame.step = nil
        return function()
            if this.state then
                -- Its own state stands beside the caller's while it runs, so that a crash inside loses nothing of it.
                frame.state_key, frame.state_fields = "procedure:" .. this.name .. ":" .. depth, nil
                local root = frame.store.root
                lang.write_root(root, frame.state_key, (defaults(this.state)))
                frame.state_fields = this.state
            end
            local output = execute(this, frame)
            if this.state then lang.write_root(frame.store.root, frame.state_key, nil) end
            return output
        end, frame
    end)
end

local function declare(name, cfg, run)
    text_of(name, "the name of a procedure")
    if type(cfg) ~= "table" then
        lang.fail("PROCEDURE_SOURCE_INVALID", "procedure " .. name .. ": expected a table {input = ..., run = ...}")
    end
    local this = {
        name = name,
        run = run or cfg.run or cfg[1],
        input = lang.fields(cfg.input, "input"),
        output = lang.fields(cfg.output, "output"),
        state = lang.fields(cfg.state, "state"),
        metadata = {},
    }
    for _, key in ipairs(METADATA) do
        if cfg[key] ~= nil then this.metadata[key] = lang.plain(cfg[key], key) end
    end
    local times = retried({}, {retry = cfg.retry, timeout = cfg.timeout}, "procedure " .. name)
    this.metadata.timeout, this.metadata.retry = times.timeout, times.retry
    this.metadata.checkpoint_timeout = seconds(cfg.checkpoint_timeout, "procedure " .. name .. ".checkpoint_timeout")
    local proxy = setmetatable({}, Procedure)
    lang.procedures[proxy] = this
    lang.order[#lang.order + 1] = this
    if name == "main" then lang.main = this end
    return proxy
end

local function procedure(name, cfg, run)
    if type(name) == "table" then return declare("main", name) end
    if type(name) == "string" and cfg == nil then
        return function(later, fn) return declare(name, later, fn) end
    end
    if type(cfg) == "function" then return declare(name, {}, cfg) end
    return declare(name, cfg, run)
end

-- --------------------------------------------------------------------------------------------------------- script mode

lang.script = {metadata = {}}

env.input = setmetatable({}, {
    __call = function(self, said)
        lang.script.input = lang.fields(said, "input")
        if lang.mode == "run" then local _ = self[1] end -- a wrong input is refused before anything is done
    end,
    __index = function(_, key)
        lang.verify_running("input." .. tostring(key))
        local frame = lang.current
        if frame.input_proxy == nil then
            local around = frame.around
            while around and around.input_proxy == nil do around = around.around end
            if around then
                frame.input_proxy = around.input_proxy
            else -- the top of a script
                frame.input = lang.checked_fields(lang.script.input, frame.given, "input")
                frame.input_proxy = lang.read_only(lang.seen(frame.input), "input")
            end
        end
        return frame.input_proxy[key]
    end,
    __newindex = function(_, key)
        lang.invalid("input." .. tostring(key), "the input is read-only: keep a changed copy in a local, or in state")
    end,
    __pairs = function(self)
        local _ = self[1]
        return pairs(lang.current.input_proxy)
    end,
    __metatable = "input",
})

env.output = function(said) lang.script.output = lang.fields(said, "output") end

env.field = setmetatable({}, {
    __index = function(_, kind)
        return function(said)
            local made = {}
            for key, value in next, said or {} do made[key] = value end
            made.type = kind
            return made
        end
    end,
    __metatable = "field",
})

env.state = setmetatable({}, {
    __call = function(_, said)
        lang.script.state = lang.fields(said, "state")
        if lang.current then lang.begin_state(lang.current, lang.script.state) end
    end,
    __index = function(_, key) return lang.state[key] end,
    __newindex = function(_, key, value) lang.state[key] = value end,
    __pairs = function() return pairs(lang.state) end,
    __metatable = "state",
})

function lang.readable_global(value)
    if value == env.state then return lang.whole_state() end
    if value == env.input then
        local _ = env.input[1]
        return lang.readable(lang.current.input_proxy)
    end
end

function lang.begin_state(frame, fields)
    frame.state_fields = fields
    local made, has_any = defaults(fields)
    if has_any then
        lang.apply(frame.store, {{op = "set", at = "", to = made}})
        frame.store.log[#frame.store.log + 1] = {op = "set", at = "", to = made}
    end
end

-- -------------------------------------------------------------------------------------------------------------- exports

lang.call, lang.perform, lang.result, lang.new_frame, lang.touch = call, perform, result, new_frame, touch
lang.auto_name, lang.seconds, lang.options_of, lang.text_of, lang.retried = auto_name, seconds, options_of, text_of, retried
env.procedure, env.Procedure, env.step, env.checkpoint, env.parallel = procedure, procedure, step, checkpoint, parallel
env.Step = {checkpoint = checkpoint, run = step, parallel = parallel}
env.null = null
lang.Stopped = Stopped
lang.defaults, lang.execute, lang.enter, lang.logs_of = defaults, execute, enter, logs_of
