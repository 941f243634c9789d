-- Programs that try to get out, to stay, or to take more than their share, each with the end that it must meet:
-- `--- name: ENDS`, then its source. NOTHING: it runs to its end and returns nil or false; what it got hold of it would
-- return. REFUSED: an error of its own. The others are limits: a soft failure of that name, or the death of the child
-- with that reason, guilty. On a slow machine the CPU of a memory bomb may end first.

--- the python module: NOTHING
return python

--- python.eval: NOTHING
return python and python.eval

--- python.builtins: NOTHING
return python and python.builtins

--- io: NOTHING
return io

--- io.popen: NOTHING
return io and io.popen('id')

--- os.execute: NOTHING
return os.execute

--- os.exit: NOTHING
return os.exit

--- os.remove and os.rename: NOTHING
return os.remove or os.rename

--- os.setlocale: NOTHING
return os.setlocale

--- os.getenv: NOTHING
return os.getenv('PATH') or os.getenv('HOME') or os.getenv('TZ')

--- os.getenv inside a checkpoint: NOTHING
in_checkpoint(true) return os.getenv('PATH') or os.getenv('HOME')

--- os.tmpname makes no file: NOTHING
in_checkpoint(true) local n = os.tmpname() return io or not n:find('^/tmp/lua_')

--- package: NOTHING
return package

--- package.loaded: NOTHING
return package and package.loaded

--- package.loadlib: NOTHING
return package and package.loadlib

--- require: NOTHING
return require

--- dofile and loadfile: NOTHING
return dofile or loadfile

--- loadstring: NOTHING
return loadstring

--- debug: NOTHING
return debug

--- debug by _G: NOTHING
return _G.debug or rawget(_G, 'debug')

--- debug by the metatable of _G: NOTHING
local m = getmetatable(_G) return m and m.__index

--- _G is the program's own: NOTHING
return _G ~= _ENV

--- _ENV's metatable: NOTHING
return getmetatable(_ENV)

--- print: NOTHING
return print

--- warn is no writer: NOTHING
return type(warn) == 'function' and pcall(warn, '@on') and nil

--- string.dump: NOTHING
return string.dump or ('').dump

--- globals of the trusted parts: NOTHING
return raw or host or control or threads or limits or codec

--- the names of libraries in load: NOTHING
local f = load('return debug or io or python or package') return f()

--- load with an environment of its own: NOTHING
return load('return debug or io or type', 'x', 't', {})()

--- load that changes _ENV: NOTHING
return load('local _ENV = ... return debug or io', 'x')({})

--- load of bytecode: NOTHING
local f = load('\27Lua\84\0\25\147\13\10\26\10') return f

--- load of bytecode by mode: NOTHING
return (load('\27LuaT', 'x', 'b'))

--- load of bytecode by mode bt: NOTHING
return (load('\27LuaT', 'x', 'bt'))

--- load of bytecode in pieces: NOTHING
local p = {'\27L', 'ua', 'T'} local i = 0 return (load(function() i = i + 1 return p[i] end, 'x', 'b'))

--- load with the name of a trusted part: NOTHING
local f = load('error("x")', '=[sandbox]') local _, e = pcall(f) return e:find('[sandbox]', 1, true)

--- upvalues of a wrapped function: NOTHING
return debug and debug.getupvalue(pcall, 1)

--- the main thread: NOTHING
local co, is_main = coroutine.running() return not is_main or coroutine.resume == nil

--- resuming the main thread: NOTHING
local co = coroutine.running() return (pcall(coroutine.resume, co))

--- closing the main thread: NOTHING
return (pcall(coroutine.close, (coroutine.running())))

--- yielding to the host: NOTHING
return (pcall(coroutine.yield, {}, 'forged'))

--- yielding a forged frame to the host: NOTHING
return (pcall(coroutine.yield, 'Y', '{"kind":"tool"}'))

--- the token in a coroutine: NOTHING
local co = coroutine.wrap(function() return coroutine.yield(call('x')) end) local r = co() return type(r) == 'table'

--- resuming a coroutine that waits, from a branch: NOTHING
local co
spawn(function() return coroutine.resume(co, 'forged') end)
co = coroutine.create(function() return call('wait') end)
local ok, reply = coroutine.resume(co)
return reply ~= 'wait'

--- the metatable of strings: NOTHING
return type(getmetatable('')) == 'table'

--- replacing the metatable of strings: NOTHING
return (pcall(setmetatable, '', {}))

--- string methods that were replaced: NOTHING
string.rep = nil string.format = nil local ok = pcall(string.find, 'a', 'a') return not ok

--- a finalizer: NOTHING
return (pcall(setmetatable, {}, {__gc = function() end}))

--- a finalizer by true: NOTHING
return (pcall(setmetatable, {}, {__gc = true}))

--- a finalizer set afterwards: NOTHING
local m = {} local got = false setmetatable({}, m) m.__gc = function() got = true end for i = 1, 2000 do local t =
  {{}} end collectgarbage() return got

--- a weak table: NOTHING
return (pcall(setmetatable, {}, {__mode = 'k'}))

--- a metatable on null: NOTHING
return getmetatable(null) or (pcall(setmetatable, null, {}))

--- writing to null: NOTHING
return (pcall(function() null.x = 1 end))

--- __metatable hides, setmetatable refuses: NOTHING
local t = setmetatable({}, {__metatable = 1}) return (pcall(setmetatable, t, {}))

--- __index on an error object that the host reads: NOTHING
local t = setmetatable({}, {__index = function() return 'x' end}) local ok, e = pcall(error, t) return e ~= t

--- __tostring that returns no string: NOTHING
return (pcall(tostring, setmetatable({}, {__tostring = function() return 1 end})))

--- __name: NOTHING
return tostring(setmetatable({}, {__name = 'FILE*'})):find('0x[%x]+') == nil

--- __len that lies to table.unpack: NOTHING
return (pcall(table.unpack, setmetatable({}, {__len = function() return 1 << 62 end})))

--- __pairs: NOTHING
local got for k in pairs(setmetatable({}, {__pairs = function() return function(_, k) if not k then return 1 end end
  end})) do got = k end return got ~= 1

--- %p: NOTHING
return (pcall(string.format, '%p', {}))

--- addresses by format: NOTHING
return string.format('%s %s', {}, print or type):find('0x%x%x%x%x%x%x%x%x%x')

--- addresses by tostring: NOTHING
return tostring(type):find('builtin') or tostring(coroutine.create(type)):find('0x7')

--- addresses by error: NOTHING
local _, e = pcall(function() return {} .. 'x' end) return e:find('0x')

--- addresses by concat of a function: NOTHING
local _, e = pcall(function() return #type end) return e:find('0x')

--- error objects are what was thrown: NOTHING
local t = {} local _, e = pcall(error, t) return e ~= t

--- errors without a value: NOTHING
local ok, e = pcall(error) return ok or e

--- the collector's count: NOTHING
return collectgarbage('count') ~= 0

--- the collector stopped: NOTHING
return (pcall(collectgarbage, 'stop'))

--- the collector's mode: NOTHING
return (pcall(collectgarbage, 'generational'))

--- a reply that the program wrote: NOTHING
local r = call({kind = 'x'}) return r.kind ~= 'x'

--- returning a function: REFUSED
return function() end

--- returning a coroutine: REFUSED
return coroutine.create(function() end)

--- a request with a function: REFUSED
return call({f = function() end})

--- a request inside itself: REFUSED
local t = {} t[1] = t return call(t)

--- a request of 200 levels: REFUSED
local t = {} local u = t for i = 1, 200 do u[1] = {} u = u[1] end return call(t)

--- an error object with a cycle: REFUSED
local t = {} t.t = t error(t)

--- an error object that is a function: REFUSED
error(function() end)

--- an error object that is a coroutine: REFUSED
error(coroutine.create(type))

--- an error object whose __tostring raises: REFUSED
error(setmetatable({}, {__tostring = function() error('x') end}))

--- an error object that is null: REFUSED
error(null)

--- an error of bytes that are no text: REFUSED
error('\255\254', 0)

--- an error of nothing: REFUSED
error()

--- an error with lines that look like a frame: REFUSED
error('\0\0\0\1Y{}', 0)

--- a runaway parser, nested parentheses: REFUSED
local f, e = load('return ' .. ('('):rep(100000)) error(e)

--- a runaway parser, nested tables: REFUSED
local f, e = load('return ' .. ('{'):rep(100000)) error(e)

--- a runaway parser, nested functions: REFUSED
local f, e = load(('f = function() '):rep(20000)) error(e)

--- a program too large to load: REFUSED
local f, e = load(('x = 1 '):rep(100000)) error(e)

--- a string of 2^60 bytes: REFUSED
return ('x'):rep(1 << 60)

--- a negative pack: REFUSED
return string.pack('i17', 1)

--- unpack of 2^31 values: REFUSED
return #{table.unpack({}, 1, 1 << 31)}

--- unpack around the end of integers: REFUSED
return #{table.unpack({}, math.mininteger, math.maxinteger)}

--- table.insert beyond the end: REFUSED
local t = {} table.insert(t, 1 << 40, 1)

--- table.move around the end of integers: REFUSED
table.move({}, 1, math.maxinteger, 2)

--- format with too many digits: REFUSED
return string.format('%1000d', 1)

--- a pattern that does not end: REFUSED
return ('x'):find('[a')

--- a pattern with too many captures: REFUSED
return ('x'):find(('()'):rep(40))

--- a deep chain of __index: REFUSED
local t = {} for i = 1, 5000 do t = setmetatable({}, {__index = t}) end return t.x

--- a __index that is itself: REFUSED
local t = {} setmetatable(t, {__index = t}) return t.x.y

--- os.date with a conversion that does not exist: REFUSED
return os.date('%Ez', 0)

--- os.date of a year that does not exist: REFUSED
return os.date('%c', 1 << 62)

--- recursion in Lua: REFUSED MEMORY CPU
local function f() return 1 + f() end return f()

--- recursion through pcall: REFUSED MEMORY CPU
local function f() local ok, e = pcall(f) error(e, 0) end f()

--- recursion through __index: REFUSED MEMORY CPU
local t = setmetatable({}, {__index = function(t, k) return t[k + 1] end}) return t[1]

--- recursion through __tostring: REFUSED MEMORY CPU
local t t = setmetatable({}, {__tostring = function() return tostring(t) end}) return tostring(t)

--- recursion through __concat: REFUSED MEMORY CPU
local t t = setmetatable({}, {__concat = function(a, b) return a .. b end}) return t .. 'x'

--- recursion through coroutines: REFUSED MEMORY CPU
local function f() return coroutine.wrap(f)() end return f()

--- recursion through gsub: REFUSED MEMORY CPU
local function f() return (('x'):gsub('x', f)) end return f()

--- recursion through sort: REFUSED MEMORY CPU
local function f() table.sort({1, 2}, f) end f()

--- recursion through load: REFUSED MEMORY CPU
local s = 'return load(...)(...)' return load(s)(s)

--- recursion through an error handler: REFUSED MEMORY CPU
local function h() error('x') end local function f() xpcall(error, function() xpcall(error, h) f() end) end f()
  error('end')

--- recursion through __close: REFUSED MEMORY CPU
local function f() local x <close> = setmetatable({}, {__close = function() f() end}) end f()

--- recursion through __eq and __lt: REFUSED MEMORY CPU
local m = {} m.__lt = function(a, b) return a < b end return setmetatable({}, m) < setmetatable({}, m)

--- a pattern that recurses in C: REFUSED MEMORY CPU
return (('x'):rep(300000)):find(('.-'):rep(250) .. 'b')

--- an empty loop: CPU
while true do end

--- a goto: CPU
::again:: goto again

--- a loop in pcall: CPU
while true do pcall(function() while true do end end) end

--- a loop in xpcall with a handler that loops: CPU
while true do xpcall(function() while true do end end, function() while true do end end) end

--- a loop in an error handler: CPU
xpcall(error, function() while true do end end)

--- pcall of pcall of pcall: CPU
local function f() return pcall(pcall, pcall, f) end while true do f() end

--- a loop in a coroutine: CPU
coroutine.wrap(function() while true do end end)()

--- a loop in a coroutine, resumed for ever: CPU
while true do coroutine.resume(coroutine.create(function() while true do end end)) end

--- coroutines that make coroutines: CPU
local function f() local co = coroutine.create(f) while true do coroutine.resume(co) coroutine.yield() end end while
  true do pcall(f) coroutine.wrap(f)() end

--- a loop in __close: CPU
do local x <close> = setmetatable({}, {__close = function() while true do end end}) end

--- a loop in __close during the limit's own error: CPU
local function trap() return setmetatable({}, {__close = function() while true do end end}) end
local a <close> = trap() local b <close> = trap() local c <close> = trap()
while true do end

--- a loop in __close of a closed coroutine: CPU
local co = coroutine.create(function()
  local x <close> = setmetatable({}, {__close = function() while true do end end}) coroutine.yield() end)
coroutine.resume(co) coroutine.close(co)

--- a loop in __index: CPU
local t = setmetatable({}, {__index = function() while true do end end}) return t.x

--- a loop in __tostring: CPU
return tostring(setmetatable({}, {__tostring = function() while true do end end}))

--- a loop in a comparator: CPU
table.sort({1, 2, 3}, function() while true do end end)

--- a loop in a for iterator: CPU
for x in function() return 1 end do end

--- a loop in load's reader: CPU
load(function() return ' ' end)  while true do end

--- catching the limit and going on: CPU
while true do local ok, e = pcall(function() while true do end end) if not ok then while true do end end end

--- an error in every iteration: CPU
while true do pcall(error, {}) end

--- string.rep of nothing: CPU
for i = 1, 1e9 do local a, b = ('x'):rep(0), (''):rep(1 << 62) end

--- string.rep of much, again and again: CPU
while true do local s = ('x'):rep(4000000) end

--- a quadratic pattern: CPU
return ('a'):rep(60000):find('.-b')

--- a cubic pattern: CPU
return ('a'):rep(5000):find('.-.-b')

--- a pattern of twenty repetitions: CPU
return ('a'):rep(200):find(('a*'):rep(20) .. 'b')

--- a pattern that backtracks in gsub: CPU
return ('a'):rep(5000):gsub('.-.-b', 'x')

--- a pattern that backtracks in gmatch: CPU
for x in ('a'):rep(5000):gmatch('.-.-.-b') do end

--- a pattern that backtracks in match: CPU
return ('a'):rep(5000):match('(.-)(.-)(.-)b')

--- a pattern with back references: CPU
return ('a'):rep(3000):find('(.-)(.-)%1%2b')

--- a pattern of balances: CPU
return ('('):rep(200000):find('%b()')

--- patterns that are each cheap: CPU
local s = ('a'):rep(300) while true do s:find('.-b') end

--- table.move over nothing: CPU
while true do table.move({}, 1, 4000000, 2) end

--- table.move with __index: CPU
table.move(setmetatable({}, {__index = type}), 1, 1 << 22, 1, setmetatable({}, {__newindex = type})) while true do end

--- table.insert at the front: CPU
local t = {} for i = 1, 1e9 do table.insert(t, 1, i % 3 == 0 and nil or true) if #t > 50000 then table.remove(t, 1)
  end end

--- table.remove at the front: CPU
local t = {} for i = 1, 100000 do t[i] = true end while true do table.remove(t, 1) t[#t + 1] = true end

--- table.sort again and again: CPU
local t = {} for i = 1, 20000 do t[i] = i * 7919 % 10007 end while true do table.sort(t) table.sort(t, function(a, b)
  return a > b end) end

--- table.sort with a comparator that lies: CPU
local t = {} for i = 1, 5000 do t[i] = i end while true do table.sort(t, function() return true end) end

--- pairs over many keys: CPU
local t = {} for i = 1, 20000 do t['k' .. i] = i end while true do pairs(t) end

--- next over many keys: CPU
local t = {} for i = 1, 20000 do t['k' .. i] = i end while true do next(t) end

--- format of much: CPU
local s = ('x'):rep(100000) while true do string.format('%s%s', s, s) end

--- string.reverse, upper, byte of much: CPU
local s = ('x'):rep(1000000) while true do s:reverse() s:upper() end

--- utf8 of much: CPU
local s = ('x'):rep(1000000) while true do utf8.len(s) end

--- load again and again: CPU
while true do load(('x = 1 '):rep(10000)) end

--- randoms: CPU
in_checkpoint(true) while true do math.random(0) end

--- tostring of new tables: CPU
while true do tostring({}) end

--- concatenation again and again: CPU
local s = ('x'):rep(1000000) local t while true do t = s .. s end

--- a comparison of long strings: CPU
local a, b = ('x'):rep(2000000) .. 'a', ('x'):rep(2000000) .. 'b' while true do local c = a < b end

--- labels and gotos that compile slowly: CPU
local t = {} for i = 1, 9000 do t[i] = '::l' .. i .. ':: goto l' .. i end while true do load(table.concat(t, ' ')) end

--- table.concat with __index: MEMORY CPU
table.concat(setmetatable({}, {__index = function() return '' end, __len = function() return 1 << 62 end}))

--- table.concat with a C function as __index: MEMORY CPU
table.concat(setmetatable({}, {__index = type}), '', 1, 1 << 50)

--- a table that grows: MEMORY CPU
local t = {} for i = 1, 1e9 do t[i] = i end

--- strings that double: MEMORY CPU
local s = 'x' while true do s = s .. s end

--- strings that double in pcall: MEMORY CPU
local s = 'x' while true do pcall(function() s = s .. s end) end

--- tables in tables: MEMORY CPU
local t = {} while true do t = {t, t} end

--- closures: MEMORY CPU
local f = type while true do local g = f f = function() return g end end

--- coroutines: MEMORY CPU
local t = {} while true do t[#t + 1] = coroutine.create(function() end) end

--- coroutines that wait: MEMORY CPU
local t = {} while true do local co = coroutine.wrap(function() coroutine.yield() end) co() t[#t + 1] = co end

--- string.rep up to the limit: MEMORY CPU
local t = {} for i = 1, 100 do t[i] = ('x'):rep(1000000 + i) end

--- string.rep just below the limit: MEMORY CPU
return #('x'):rep(16000000) + #('y'):rep(16000001)

--- table.concat: MEMORY CPU
local t = {} for i = 1, 30 do t[i] = ('x'):rep(1000000) end return #table.concat(t)

--- table.concat with a long separator: MEMORY CPU
local t = {} for i = 1, 100 do t[i] = '' end return #table.concat(t, ('x'):rep(1000000))

--- gsub that grows: MEMORY CPU
return #('x'):rep(100000):gsub('x', ('y'):rep(100000))

--- gsub that grows by a function: MEMORY CPU
return #('x'):rep(100000):gsub('x', function() return ('y'):rep(100000) end)

--- gsub between every two letters: MEMORY CPU
return #('x'):rep(100000):gsub('', ('y'):rep(10000))

--- format that grows: MEMORY CPU
local s = ('x'):rep(3000000) return #string.format(('%s'):rep(20), table.unpack({s, s, s, s, s, s, s, s, s, s, s, s,
  s, s, s, s, s, s, s, s}))

--- string.pack that pads: MEMORY CPU
return #string.pack('c2000000000', '')

--- table.pack of many: MEMORY CPU
local t = {} for i = 1, 200000 do t[i] = i end local u = {} while true do u[#u + 1] = table.pack(table.unpack(t)) end

--- names of tables: MEMORY CPU
local t = {} while true do t[#t + 1] = tostring({}) end

--- keys of pairs: MEMORY CPU
local t = {} for i = 1, 200000 do t['k' .. i] = i end for k in pairs(t) do end

--- an error object that fills: MEMORY CPU
local t = {} while true do pcall(error, t) t[#t + 1] = ('x'):rep(100000 + #t) end

--- varargs: MEMORY CPU
local function f(...) return f(..., ...) end local function g(...) return g(1, 2, 3, 4, 5, 6, 7, 8, ...) end pcall(g)
  local t = {} while true do t = {t, {}, ('x'):rep(1000 + #t)} end

--- load of many programs: MEMORY CPU
local t = {} while true do t[#t + 1] = load('return ' .. #t) end

--- globals: MEMORY CPU
local i = 0 while true do i = i + 1 _G['g' .. i] = i end

--- upvalues of string.gmatch: MEMORY CPU
local t = {} while true do t[#t + 1] = ('x'):gmatch('x') end

--- the request: MEMORY CPU
local t = {} for i = 1, 60000 do t[i] = ('x'):rep(100) .. i end local u = {} for i = 1, 200 do u[i] = t end call(u)

--- a request of a megabyte: OUTPUT
call(('x'):rep(400000))

--- a result of a megabyte: OUTPUT
return ('x'):rep(400000)

--- requests without end: OUTPUT
while true do call(('x'):rep(100000)) end

--- operations without end: OPERATIONS
while true do call(1) end

--- operations without end in pcall: OPERATIONS
while true do pcall(call, 1) end

--- operations without end in coroutines: OPERATIONS
while true do coroutine.wrap(function() call(1) end)() end

--- branches without end: THREADS
while true do spawn(function() end) end

--- branches without end in pcall: THREADS
while true do pcall(spawn, function() end) end

--- warnings without end: NOTHING
for i = 1, 10000 do load('warn(' .. i .. ', "x")')() end
