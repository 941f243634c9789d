-- Agents, models, people, tools, time, logs and files: the objects that programs call; and the program as a whole.

local host, lang = ...
local env, null = host.env, host.null
local perform, ask, auto_name, seconds = lang.perform, lang.ask, lang.auto_name, lang.seconds

-- --------------------------------------------------------------------------------------------------------------- tools

local tools = setmetatable({}, {__mode = "k"}) -- by object: "server.tool", or "server.*"

local function gateway_tool(server, name)
    local this = setmetatable({}, {
        __call = function(_, args, options)
            lang.verify_running("tool." .. server .. "." .. name)
            options = lang.options_of(options, server .. "." .. name)
            local request = lang.retried({op = "tool", server = server, tool = name}, options, server .. "." .. name)
            request.args = lang.plain(args or {}, "the arguments of " .. server .. "." .. name)
            request.intent = options.intent
            return ask(request)
        end,
        __name = "tool",
        __metatable = "tool",
    })
    tools[this] = server .. "." .. name
    lang.uses.tools[server .. "." .. name] = true
    return this
end

env.tool = setmetatable({}, {
    __index = function(all, server)
        local of_server = setmetatable({}, {
            __index = function(self, name)
                local made = gateway_tool(server, name)
                rawset(self, name, made)
                return made
            end,
            __metatable = "tool",
        })
        tools[of_server] = server .. ".*"
        rawset(all, server, of_server)
        return of_server
    end,
    __metatable = "tool",
})

-- Reading the network is a tool of the gateway, which decides which hosts may be read.
env.http_client = {}
for _, method in ipairs({"get", "head"}) do
    env.http_client[method] = function(url, options)
        lang.verify_running("http_client." .. method)
        local args = {url = lang.text_of(url, "http_client." .. method)}
        for key, value in next, lang.options_of(options, "http_client." .. method) do args[key] = value end
        return ask({op = "tool", server = "http_client", tool = method, args = lang.plain(args, "http_client")})
    end
end

-- -------------------------------------------------------------------------------------------------------------- agents

local done = {calls = {}}
env.tactus = {
    done = setmetatable({}, {
        __index = {
            called = function() return #done.calls > 0 end,
            last_call = function() return done.calls[#done.calls] end,
        },
        __metatable = "tool",
    }),
}
tools[env.tactus.done] = "done"

local function global_name(value)
    for _, name in ipairs(lang.sorted_keys(env)) do
        if rawequal(env[name], value) and type(name) == "string" then return name end
    end
end

-- What an agent may call: tools of the gateway by name, and functions of the program with what is said of them.
local function offered(said, where)
    local names, functions, described, offers_done = {}, {}, {}, false
    for _, key in ipairs(lang.sorted_keys(said or {})) do
        local one = said[key]
        if tools[one] == "done" then
            offers_done = true
        elseif tools[one] then
            names[#names + 1] = tools[one]
        elseif type(one) == "string" then
            names[#names + 1] = one
            lang.uses.tools[one] = true
        elseif type(one) == "function" or type(one) == "table" then
            local cfg = type(one) == "table" and one or {run = one}
            local run = cfg.run or cfg[1]
            if type(run) ~= "function" then
                lang.invalid(where .. ".tools", "expected a tool, a function, or {name =, description =, run =}")
            end
            functions[#functions + 1] = run
            described[#described + 1] = {
                name = cfg.name or type(key) == "string" and key or global_name(one) or "tool_" .. #functions,
                description = cfg.description,
                fields = lang.fields(cfg.input, where .. ".tools.input"),
            }
        else
            lang.invalid(where .. ".tools", "expected a tool, found a " .. type(one) .. " at " .. tostring(key)
                .. (type(key) == "number" and "; is its name defined before the agent?" or ""))
        end
    end
    return names, functions, described, offers_done
end

local OPTIONS = {"provider", "model", "approve", "max_turns", "max_tool_calls", "max_tokens", "timeout", "retries",
    "stream", "settings", "temperature"}

local function make_agent(name, cfg)
    if type(cfg) ~= "table" then lang.invalid("agent " .. tostring(name), "expected {model = ..., ...}") end
    local where = "agent " .. (name or "without a name")
    local names, functions, described, offers_done = offered(cfg.tools, where)
    local this = {id = #lang.agents + 1, name = name, calls = {}}
    local spec = {tools = host.array(names), functions = host.array(described), offers_done = offers_done}
    for _, key in ipairs(OPTIONS) do
        if cfg[key] ~= nil then spec[key] = lang.plain(cfg[key], where .. "." .. key) end
    end
    spec.timeout = seconds(cfg.timeout, where .. ".timeout")
    local prompt = cfg.system_prompt or cfg.instructions
    if type(prompt) == "function" then spec.prompt_is_function = true
    elseif prompt ~= nil then spec.system_prompt = lang.plain(prompt, where .. ".system_prompt") end
    if cfg.output_type ~= nil and type(cfg.output_type) == "table" then
        spec.output_fields = lang.fields(cfg.output_type.fields or cfg.output_type.properties or cfg.output_type,
            where .. ".output_type")
    end
    lang.agents[this.id] = this
    lang.uses.agents[#lang.uses.agents + 1] = {name = name, model = spec.model, tools = spec.tools}

    local function turn(said)
        lang.verify_running(where)
        if type(said) == "string" then said = {message = said} end
        local options = lang.options_of(said, where)
        local request = {op = "agent", id = this.id, name = name or auto_name("agent")}
        if options.message ~= nil then request.message = lang.plain(options.message, where .. ".message") end
        if not this.is_known then request.spec = spec end
        local found = perform(request, function(which)
            local frame = lang.new_frame(lang.current, {is_checkpoint = true, counts = {}})
            if which == 0 then return function() return prompt() end, frame end
            return functions[which], frame
        end)
        this.is_known = true
        lang.touch(lang.current, this)
        this.output = found.output
        if found.done ~= nil and #found.done > 0 then
            lang.touch(lang.current, done)
            local calls = {}
            for _, one in ipairs(done.calls) do calls[#calls + 1] = one end
            for _, one in ipairs(found.done) do calls[#calls + 1] = one end
            done.calls = calls
        end
        return this.output
    end

    return setmetatable({}, {
        __call = function(_, said) return turn(said) end,
        __index = function(_, key)
            if key == "output" then return this.output end
            if key == "name" then return name end
            if key == "turn" then return function(first, second) return turn(second or (type(first) == "table"
                and getmetatable(first) ~= "agent" and first or nil)) end end
            if key == "messages" then
                if not this.is_known then return {} end
                return ask({op = "messages", id = this.id})
            end
        end,
        __newindex = function(_, key) lang.invalid(where .. "." .. tostring(key), "an agent's fields are read-only") end,
        __name = "agent",
        __metatable = "agent",
    })
end

function env.agent(name, cfg)
    lang.text_of(name, "the name of an agent")
    if cfg ~= nil then return make_agent(name, cfg) end
    return function(later) return make_agent(name, later) end
end

function env.Agent(said, cfg)
    if type(said) == "string" then return env.agent(said, cfg) end
    return make_agent(type(said) == "table" and said.name or nil, said)
end

-- -------------------------------------------------------------------------------------------------------------- models

local function make_model(name, cfg)
    local where = "model " .. name
    local spec = lang.plain(cfg, where)
    if type(spec) ~= "table" then lang.invalid(where, "expected {type = ..., ...}") end
    lang.uses.models[#lang.uses.models + 1] = {name = name, spec = spec}
    local this
    local function predict(first, second)
        if rawequal(first, this) then first = second end
        lang.verify_running(where)
        return ask({op = "model", name = name, spec = spec, given = lang.plain(first, "the input of " .. where)})
    end
    this = setmetatable({}, {
        __index = {predict = predict, name = name},
        __call = function(_, given) return predict(given) end,
        __metatable = "model",
    })
    return this
end

function env.model(name, cfg)
    lang.text_of(name, "the name of a model")
    if cfg ~= nil then return make_model(name, cfg) end
    return function(later) return make_model(name, later) end
end
env.Model = env.model

-- -------------------------------------------------------------------------------------------------------------- people

local function escalations(said, where)
    if said == nil then return nil end
    local levels = host.array({})
    for place, one in ipairs(said.after ~= nil and {said} or said) do
        levels[place] = {
            after = seconds(one.after, where .. ".escalate.after"),
            webhooks = lang.plain(one.webhooks or host.array({}), where .. ".escalate.webhooks"),
        }
    end
    return levels
end

local function human(form)
    return function(said)
        local where = "Human." .. form
        lang.verify_running(where)
        if type(said) == "string" then said = {message = said} end
        local options = lang.options_of(said, where)
        local default = options.default_on_timeout
        if default == nil then default = options.default end
        local webhooks = options.webhooks or options.webhook
        if type(webhooks) == "string" then webhooks = {webhooks} end
        local request = {
            op = "ask",
            form = form,
            name = options.name or auto_name(form, form),
            message = lang.text_of(options.message or options.prompt or options.title, where .. ".message"),
            timeout = seconds(options.timeout, where .. ".timeout"),
            has_default = default ~= nil,
            escalate = escalations(options.escalate or options.escalation, where),
            webhooks = lang.plain(webhooks or host.array({}), where .. ".webhooks"),
            callback = options.callback and lang.text_of(options.callback, where .. ".callback"),
            input_type = options.input_type or options.type,
            required = options.required,
        }
        if default ~= nil then request.default = lang.plain(default, where .. ".default") end
        if options.options ~= nil then request.options = lang.plain(options.options, where .. ".options") end
        local context = options.context
        if form == "review" and context == nil then context = options.artifact end
        if context ~= nil then request.context = lang.plain(context, where .. ".context") end
        return ask(request)
    end
end

env.Human = {}
for _, form in ipairs({"approve", "input", "select", "review", "escalate"}) do env.Human[form] = human(form) end

-- ------------------------------------------------------------------------------------------- time, signals, other runs

function env.sleep(said, options)
    lang.verify_running("sleep")
    local name = lang.options_of(options, "sleep").name or auto_name("sleep", "sleep")
    local wanted = seconds(said, "sleep")
    if wanted == nil then lang.invalid("sleep", "expected seconds, or a text like \"30s\", found " .. tostring(said)) end
    return ask({op = "sleep", seconds = wanted, name = name})
end

function env.signal(name, options)
    lang.verify_running("signal")
    options = lang.options_of(options, "signal")
    return ask({op = "signal", name = lang.text_of(name, "the name of a signal"),
        timeout = seconds(options.timeout, "signal.timeout")})
end

-- What the run knows and draws; the same in every attempt.
function env.tactus.now() lang.verify_running("tactus.now") return ask({op = "now"}) end
function env.tactus.uuid() lang.verify_running("tactus.uuid") return ask({op = "uuid"}) end
function env.tactus.random() lang.verify_running("tactus.random") return ask({op = "random"}) end
function env.tactus.run_id() lang.verify_running("tactus.run_id") return ask({op = "run_id"}) end

function env.tactus.emit(value, name)
    lang.verify_running("tactus.emit")
    return ask({op = "emit", name = name or "emit", value = lang.plain(value, "tactus.emit")})
end

-- Another procedure, as a run of its own.
function env.tactus.call(name, given, options)
    lang.verify_running("tactus.call")
    return ask({op = "child", name = lang.text_of(name, "the name of a procedure"),
        given = lang.plain(given, "the input of " .. name), version = lang.options_of(options, "tactus.call").version})
end

-- ------------------------------------------------------------------------------------------------------- logs and files

-- A table as people read it, with its keys in order.
function lang.text(value, is_plain)
    if type(value) ~= "table" or value == null then
        return type(value) == "string" and string.format("%q", value) or tostring(value)
    end
    local made = is_plain and value or lang.plain(value, "Log")
    local parts, is_list = {}, lang.is_list(made)
    for place, key in ipairs(lang.sorted_keys(made)) do
        parts[place] = (is_list and "" or key .. " = ") .. lang.text(made[key], true)
    end
    return "{" .. table.concat(parts, ", ") .. "}"
end

local function log(level)
    return function(...)
        local parts = {}
        for place = 1, select("#", ...) do
            local one = select(place, ...)
            parts[place] = type(one) == "table" and one ~= null and getmetatable(one) ~= "error" and lang.text(one) or tostring(one)
        end
        if lang.mode == "declare" then return end
        local logs = lang.current.logs
        if #logs < 65 then logs[#logs + 1] = {level = level, text = table.concat(parts, " ")} end
    end
end

env.Log = {debug = log("debug"), info = log("info"), warn = log("warning"), warning = log("warning"),
    error = log("error")}
env.print = env.Log.info

local function file(what)
    return function(name)
        local found = host.call({op = "file", what = what, name = lang.text_of(name, "File." .. what)})
        if lang.current then lang.enter(lang.current) end
        return lang.result(found)
    end
end

env.File = {
    read = file("read"),
    exists = file("exists"),
    size = file("size"),
    list = function() return lang.result(host.call({op = "file", what = "list", name = ""})) end,
    write = function()
        lang.fail("FILE_READ_ONLY", "File.write: a procedure has the files that were uploaded with it, and these are "
            .. "read-only: keep what it makes in state, or write it with a tool")
    end,
}

-- ---------------------------------------------------------------------------------------------------------- the program

local function declaration(this, is_script)
    return {
        name = this.name,
        input = this.input or null,
        output = this.output or null,
        state = this.state or null,
        metadata = this.metadata,
        is_script = is_script,
    }
end

-- The procedure that a run begins with: the one that is called main, or that the file's variable `main` holds. Without
-- one it is the file itself.
local function entry()
    local named = rawget(env, "main")
    return lang.main or named ~= nil and lang.procedures[named] or nil
end

local function declared(name)
    local chunk = host.chunk(name)
    local ok, said = pcall(chunk)
    if not ok and said ~= lang.Stopped then error(said, 0) end
    local stopped = lang.stopped_at
    local main = entry()
    if stopped and main then
        error(stopped.place .. "the top of a file with a main procedure declares, and does nothing yet; found "
            .. stopped.what .. ": move it into run = function() ... end", 0)
    end
    local is_stopped = stopped ~= nil
    local subs = host.array({})
    for _, one in ipairs(lang.order) do
        if one ~= main then subs[#subs + 1] = declaration(one, false) end
    end
    local made = main and declaration(main, false) or declaration(lang.script, true)
    made.has_body = main ~= nil and type(main.run) == "function" or main == nil and (is_stopped or said ~= nil)
    made.procedures = subs
    made.uses = {tools = host.array(lang.sorted_keys(lang.uses.tools)), models = host.array(lang.uses.models),
        agents = host.array(lang.uses.agents)}
    return made
end

local function run(start)
    lang.mode = "run"
    local frame = lang.new_frame(nil, {store = lang.new_store({}), given = lang.seen(start.input), logs = {}})
    lang.enter(frame)
    local output
    if start.is_script then
        if start.state ~= null then lang.begin_state(frame, start.state) end
        frame.fn = host.chunk(start.chunk)
        output = frame.fn()
        if entry() then
            lang.fail("PROCEDURE_SOURCE_INVALID", "the file works before it declares main: move main to its top")
        end
        output = lang.checked_output(lang.script.output, output)
    else
        lang.mode = "declare" -- the top of the file declares, and does nothing yet
        host.chunk(start.chunk)()
        lang.mode = "run"
        local main = entry()
        lang.begin_state(frame, main.state)
        output = lang.execute(main, frame)
    end
    return {value = lang.plain(output, "output"), changes = lang.taken(frame.store), logs = lang.logs_of(frame)}
end

return function(start)
    if start.mode == "declare" then return declared(start.chunk) end
    return run(start)
end
