-- The state of one attempt: what a submitted program sees, and the loop that runs its threads between operations.
-- Runs once in a fresh Lua state with the raw libraries, hands the program wrapped ones, and empties the raw globals.
-- `parts` are the other trusted ones; `limits` are numbers.
local raw, parts, make_libraries, limits = ...
local codec = parts.codec
local coroutine, debug = raw.coroutine, raw.debug
local raw_create, raw_resume, raw_yield = coroutine.create, coroutine.resume, coroutine.yield
local raw_status, raw_running, raw_close = coroutine.status, coroutine.running, coroutine.close
local raw_isyieldable = coroutine.isyieldable
local raw_pcall, error, type, select, tostring = raw.pcall, raw.error, raw.type, raw.select, raw.tostring
local sethook, getinfo, traceback, clock = debug.sethook, debug.getinfo, debug.traceback, raw.os.clock
local load, setmetatable, pack, unpack = raw.load, raw.setmetatable, raw.table.pack, raw.table.unpack
local sub, gsub, byte, format = raw.string.sub, raw.string.gsub, raw.string.byte, raw.string.format
local decode, encode = codec.decode, codec.encode

local OUT_OF_MEMORY <const> = "not enough memory"
local TOKEN = {}            -- what only an operation yields; the program never holds it
local free = {}             -- numbers of threads that have ended
local threads = {}          -- number to {co, args, is_started}
local thread_of = setmetatable({}, { __mode = "k" })   -- coroutines of threads, which the program may not resume
local waiting = setmetatable({}, { __mode = "k" })     -- coroutines of the program inside which an operation waits
local chunks = {}
local warnings, warned = {}, {}
local env = {}

-- Limits ---------------------------------------------------------------------------------------------------------
-- `dead` is the limit that this state has met. From then on every hook, pcall and resume raises it again: nothing that
-- the program does can outlive it, and every thread of the state ends with it. A program sees it in __close, as the error
-- that closes: it is an empty table there, and what is told of the limit stands beside it.
local dead, dead_limit, dead_message = false, nil, nil
local slice_until, attempt_left = 0, limits.attempt_cpu_s
local operations, charged = 0, 0

local function raise_dead()
  error(dead, 0)
end

local function die(name, text)
  if not dead then
    local function say() return text end
    local function keep() error("the error of a limit has no fields", 2) end
    dead_limit, dead_message = name, text
    dead = setmetatable({}, { __metatable = false, __tostring = say, __newindex = keep })
  end
  -- The program gets no further instruction in this coroutine, not in __close either; the loop below does.
  local _, is_loop = raw_running()
  if not is_loop then sethook(raise_dead, "", 1) end
  error(dead, 0)
end

local function check()
  if dead then die() end
  if clock() > slice_until then
    die("CPU", format("expected the program to need at most %g s of CPU between two operations and %g s in one "
      .. "attempt, found that it needs more. Do less at a time, or spread it over checkpoints",
      limits.slice_cpu_s, limits.attempt_cpu_s))
  end
end

-- Work that C does for the program without instructions that the hook could count: bytes or elements, roughly.
local function charge(amount)
  charged = charged + amount
  if charged > 1000000 then
    charged = 0
    check()
  end
end

local function watch(co)
  sethook(co, check, "", limits.hook_instructions)
  return co
end

-- A state that is full has no room to say where the program was: this is given up then, and collected when it is needed.
local reserve = raw.string.rep("\0", limits.reserve_bytes)

local function is_out_of_memory(problem)
  if problem ~= OUT_OF_MEMORY then return false end
  reserve = nil
  return true
end

local function clean(problem)
  if dead then error(dead, 0) end
  if is_out_of_memory(problem) then
    die("MEMORY", format("expected the program to need at most %d bytes of memory, found that it needs more. "
      .. "Keep less at a time", limits.state_bytes))
  end
  if type(problem) == "string" and byte(problem, 1) == 91 then return (gsub(problem, "^%[%l+%]:%d+: ", "", 1)) end
  return problem
end

-- Calls that catch ------------------------------------------------------------------------------------------------
local function caught(ok, ...)
  if ok then
    if dead then error(dead, 0) end
    return true, ...
  end
  return false, clean((...))
end

local function pcall(f, ...)
  return caught(raw_pcall(f, ...))
end

-- The handler runs after the stack is gone (there is no debug library to look at it), so that operations work in it.
local function handled(handler, ok, ...)
  if ok then return true, ... end
  local _, answer = pcall(handler, ...)
  return false, answer
end

local function xpcall(f, handler, ...)
  return handled(handler, pcall(f, ...))
end

-- Coroutines of the program ------------------------------------------------------------------------------------------
local wrapped = {}

local function passed(co, ok, mark, ...)
  if ok and mark == TOKEN then
    waiting[co] = true
    local reply = raw_yield(TOKEN, ...)
    waiting[co] = nil
    return passed(co, raw_resume(co, reply))
  end
  if dead then error(dead, 0) end
  if ok then return true, mark, ... end
  return false, clean(mark)
end

local function refuse_thread(co)
  if type(co) ~= "thread" then error("bad argument #1 (coroutine expected, found " .. type(co) .. ")", 3) end
  if thread_of[co] then
    error("this is a thread of the procedure itself: only coroutines that the program made can be driven", 3)
  end
end

function wrapped.create(f)
  if type(f) ~= "function" then error("bad argument #1 to 'create' (function expected)", 2) end
  return watch(raw_create(f))
end

function wrapped.resume(co, ...)
  refuse_thread(co)
  if waiting[co] then return false, "cannot resume non-suspended coroutine" end
  return passed(co, raw_resume(co, ...))
end

local function rethrown(co, ok, ...)
  if ok then return ... end
  raw_close(co)
  error((...), 0)
end

function wrapped.wrap(f)
  local co = wrapped.create(f)
  return function(...)
    if waiting[co] then error("cannot resume non-suspended coroutine", 2) end
    return rethrown(co, passed(co, raw_resume(co, ...)))
  end
end

function wrapped.yield(...)
  if thread_of[raw_running()] then error("attempt to yield from outside a coroutine", 2) end
  return raw_yield(...)
end

function wrapped.status(co)
  if type(co) ~= "thread" then error("bad argument #1 to 'status' (coroutine expected)", 2) end
  if waiting[co] then return "normal" end
  return raw_status(co)
end

function wrapped.running()
  local co = raw_running()
  return co, thread_of[co] ~= nil
end

function wrapped.isyieldable()
  return raw_isyieldable() and thread_of[raw_running()] == nil
end

function wrapped.close(co)
  refuse_thread(co)
  if waiting[co] then error("cannot close a coroutine that waits for an operation", 2) end
  local ok, problem = raw_close(co)
  if ok then
    if dead then error(dead, 0) end
    return true
  end
  return false, clean(problem)
end

-- Where the program is ------------------------------------------------------------------------------------------------
-- Names of trusted parts begin with "["; those of the program never do.
local function position(co, level)
  while true do
    local info
    if co then info = getinfo(co, level, "Sl") else info = getinfo(level, "Sl") end
    if not info then return nil end
    if info.currentline > 0 and byte(info.source, 2) ~= 91 then return sub(info.source, 2), info.currentline end
    level = level + 1
  end
end

local function here()
  return position(nil, 3)
end

-- Where a function of the program begins; nothing for one of the trusted parts. The top of a file begins at line 1.
local function beginning(f)
  local info = getinfo(f, "S")
  if info.what == "C" or byte(info.source, 2) == 91 then return nil end
  return sub(info.source, 2), info.linedefined > 0 and info.linedefined or 1
end

local function warn(line, what)
  local key = tostring(line) .. ":" .. what
  if warned[key] or #warnings >= limits.warnings then return end
  warned[key] = true
  local chunk = position(nil, 3)
  warnings[#warnings + 1] = { chunk = chunk, line = line, what = what }
end

-- The host, for the trusted language alone ----------------------------------------------------------------------------
local host = { null = codec.null, array = codec.array, is_array = codec.is_array, env = env, here = here, warn = warn,
  beginning = beginning }

function host.call(request)
  if dead then die() end -- in __close, in what is left of a program that has met its limit
  operations = operations + 1
  if operations > limits.operations then
    die("OPERATIONS", format("expected at most %d operations in one attempt, found more", limits.operations))
  end
  local text = encode(request, "the request")
  if not raw_isyieldable() then
    error("an operation cannot wait here: it stands inside a function of a library that calls back. "
      .. "Perform it before or after", 2)
  end
  return decode((raw_yield(TOKEN, text)))
end

function host.spawn(f, ...)
  if dead then die() end
  local id = #free > 0 and raw.table.remove(free) or #threads + 1
  if id > limits.threads then
    die("THREADS", format("expected at most %d branches at once, found more", limits.threads))
  end
  local co = watch(raw_create(f))
  threads[id] = { co = co, args = pack(...) }
  thread_of[co] = id
  return id
end

function host.chunk(name)
  local chunk = chunks[name]
  if not chunk then error("no chunk named " .. tostring(name), 2) end
  if not chunk.f then error(chunk.problem, 0) end
  return chunk.f
end

--- Let `unwrap(t)` give the plain table that stands for one with a metatable when it is encoded.
function host.unwrap(unwrap)
  codec.unwrap = unwrap
end

-- What the child calls ------------------------------------------------------------------------------------------------
local main
local control = {}

local function printable(text)
  if not raw.utf8.len(text) then text = gsub(text, "[\128-\255]", "?") end
  return (gsub(text, "%z", "?"))
end

local function fail(problem, co)
  local value_text
  if not dead and type(problem) == "table" then
    -- An error object may be so large, or share so much, that writing it down meets a limit: then that is the end.
    local ok, text = raw_pcall(encode, problem, "the error")
    if not ok and is_out_of_memory(text) then raw_pcall(clean, text) end
    value_text = ok and text or nil
  end
  problem = dead or problem
  local failure = { message = "", traceback = "" }
  if co then
    -- The program's own frames: those of trusted parts and of C tell it nothing.
    failure.traceback = sub(gsub(gsub(traceback(co), "\n\t%[%a+%]:[^\n]*", ""), "\n\t%?:[^\n]*", ""), 1, 4000)
    failure.chunk, failure.line = position(co, 0)
  end
  if problem == dead then
    failure.limit, failure.message = dead_limit, dead_message
    value_text = nil
  elseif type(problem) == "table" then
    failure.message = "the program raised a table"
    local message = raw.rawget(problem, "message")
    if type(message) == "string" then failure.message = sub(message, 1, 4000) end
  elseif type(problem) == "string" then
    failure.message = sub(problem, 1, 4000)
  else
    failure.message = "the program raised a " .. type(problem) ..
      ((type(problem) == "number" or type(problem) == "boolean") and " (" .. tostring(problem) .. ")" or "")
  end
  failure.message, failure.traceback = printable(failure.message), printable(failure.traceback)
  local text = encode(failure)
  if value_text then text = sub(text, 1, -2) .. ',"value":' .. value_text .. "}" end
  return "F", text
end

local function ended(thread, ok, mark, text)
  if ok and mark == TOKEN then return "Y", text end
  local co = thread.co
  if not ok then
    if not dead and is_out_of_memory(mark) then raw_pcall(clean, mark) end
    return fail(dead or clean(mark), co)
  end
  if dead then return fail(dead) end
  if raw_status(co) ~= "dead" then return fail("the thread yielded what is no operation", co) end
  local is_encoded, answer = raw_pcall(encode, mark, "the result")
  if not is_encoded then return fail(clean(answer)) end
  return "R", answer
end

local function run(id, payload)
  local thread = threads[id]
  if not thread or not thread.co then return fail("there is no thread " .. tostring(id)) end
  if dead then return fail(dead) end
  if thread.is_started then return ended(thread, raw_resume(thread.co, payload)) end
  thread.is_started = true
  if id == 0 then return ended(thread, raw_resume(thread.co, decode(payload))) end
  local args = thread.args
  thread.args = nil
  return ended(thread, raw_resume(thread.co, unpack(args, 1, args.n)))
end

--- One slice of one thread: up to its next operation, its end or its failure. Answers kind, payload, warnings.
function control.resume(id, payload)
  local began = clock()
  slice_until = began + (attempt_left < limits.slice_cpu_s and attempt_left or limits.slice_cpu_s)
  local ok, kind, text = raw_pcall(run, id, payload)
  sethook()
  slice_until = raw.math.huge
  if not ok then
    local problem = kind
    if not dead then raw_pcall(clean, problem) end
    kind, text = fail(dead or problem)
  end
  attempt_left = attempt_left - (clock() - began)
  watch(raw_running())
  if kind ~= "Y" and threads[id] and threads[id].co then
    threads[id].co = nil
    if id > 0 then free[#free + 1] = id end -- nobody resumes it any more: the next thread may have its number
  end
  local told = ""
  if #warnings > 0 then
    told = encode(codec.array(warnings))
    warnings = {}
  end
  return kind, text, told
end

--- Keep a chunk of the program. One that does not compile is told when the language asks for it.
function control.chunk(name, source)
  local f, problem = load(source, "=" .. name, "t", env)
  chunks[name] = { f = f, problem = problem }
end

local configure_libraries = make_libraries(raw, env, {
  charge = charge, check = check, clean = clean, die = die, here = here, warn = warn, pcall = pcall, limits = limits,
  host = host, patterns = parts.patterns, determinism = parts.determinism, tables = parts.tables,
})

function control.configure(payload, live_seed)
  configure_libraries(decode(payload), live_seed)
end

env._G = env
env.pcall, env.xpcall, env.coroutine = pcall, xpcall, wrapped

-- The language's own globals: the same functions in tables that the program cannot reach, and so cannot replace.
-- (Methods of strings are looked up in the program's `string`: the language does not use them.)
local trusted = {}
for name, value in raw.next, env do
  if type(value) == "table" and value ~= env then
    local copy = {}
    for field, inner in raw.next, value do copy[field] = inner end
    value = copy
  end
  trusted[name] = value
end
trusted._G = trusted
-- What the language keeps beside a program's tables must not keep them alive, and the program never sees its order.
trusted.setmetatable, trusted.next = raw.setmetatable, raw.next

--- Give the language its host; what it returns is the main function of thread 0.
function control.language(text)
  local f = raw.assert(load(text, "=[language]", "b", trusted))
  main = f(host)
  if type(main) ~= "function" then
    error("expected the language to return its main function, found " .. type(main), 0)
  end
  local co = watch(raw_create(main))
  threads[0] = { co = co }
  thread_of[co] = 0
end

slice_until = raw.math.huge
watch(raw_running())
return control
