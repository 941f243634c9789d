-- More of the same as attempts.lua, in kinds that are not there: what a program does after its limit, with the error of
-- the limit itself, with tables that share, with to-be-closed values, and with names that trusted parts look at.

--- an operation in __close after the limit of a coroutine: CPU
pcall(function()
  local x <close> = setmetatable({}, {__close = function() call('after death') end})
  coroutine.wrap(function() while true do end end)()
end)

--- an operation in __close after the limit of a nested coroutine: CPU
local function deep(n)
  local x <close> = setmetatable({}, {__close = function() call('after death') end})
  if n == 0 then while true do end end
  return (select(2, pcall(coroutine.wrap(deep), n - 1)))
end
pcall(deep, 5)

--- the limit's error taken apart in __close: CPU
pcall(function()
  local x <close> = setmetatable({}, {__close = function(_, e)
    for _, key in ipairs({'limit', 'message'}) do pcall(rawset, e, key, nil) end
  end})
  coroutine.wrap(function() while true do end end)()
end)

--- the limit's error replaced by another name: CPU
pcall(function()
  local x <close> = setmetatable({}, {__close = function(_, e) rawset(e, 'limit', 'NONE') rawset(e, 'message', {}) end})
  coroutine.wrap(function() while true do end end)()
end)

--- the limit's error with a metatable: CPU
pcall(function()
  local x <close> = setmetatable({}, {__close = function(_, e)
    pcall(setmetatable, e, {__tostring = function() return 'free' end}) e.x = e end})
  coroutine.wrap(function() while true do end end)()
end)

--- the limit's error kept for later: CPU
local kept
local ok = pcall(function()
  local x <close> = setmetatable({}, {__close = function(_, e) kept = e end})
  coroutine.wrap(function() while true do end end)()
end)
return kept

--- an error in __close in the place of the limit's: CPU
pcall(function()
  local x <close> = setmetatable({}, {__close = function() error('mine') end})
  coroutine.wrap(function() while true do end end)()
end)

--- a hundred __close after the limit: CPU
local function deep(n)
  local x <close> = setmetatable({}, {__close = function() for i = 1, 100 do end error('mine') end})
  if n == 0 then coroutine.wrap(function() while true do end end)() end
  return (deep(n - 1))
end
pcall(deep, 100)

--- a coroutine that is closed after the limit: CPU
pcall(function()
  local co = coroutine.create(function()
    local x <close> = setmetatable({}, {__close = function() while true do end end}) coroutine.yield() end)
  coroutine.resume(co)
  local x <close> = setmetatable({}, {__close = function() coroutine.close(co) call('after death') end})
  coroutine.wrap(function() while true do end end)()
end)

--- a coroutine that goes on after the limit: CPU
pcall(function()
  local other = coroutine.wrap(function() while true do coroutine.yield(1) end end)
  other()
  local x <close> = setmetatable({}, {__close = function() while true do other() end end})
  coroutine.wrap(function() while true do end end)()
end)

--- a branch made after the limit: CPU
pcall(function()
  local x <close> = setmetatable({}, {__close = function() spawn(function() return call('after death') end) end})
  coroutine.wrap(function() while true do end end)()
end)

--- memory in a coroutine, caught around it: MEMORY CPU
while true do pcall(coroutine.wrap(function() local s = 'x' while true do s = s .. s end end)) end

--- memory in __close: MEMORY CPU
pcall(function()
  local x <close> = setmetatable({}, {__close = function() local s = 'x' while true do s = s .. s end end})
  error('x')
end)

--- memory in a comparator: MEMORY CPU
local t = {} table.sort({3, 2, 1}, function(a, b) for i = 1, 1e7 do t[#t + 1] = {} end return a < b end)

--- memory in __concat: MEMORY CPU
local m = setmetatable({}, {__concat = function(a, b) local s = 'x' while true do s = s .. s end end}) return m .. 'x'

--- memory in __tostring of an error: MEMORY CPU
error(tostring(setmetatable({}, {__tostring = function() local s = 'x' while true do s = s .. s end end})))

--- memory in an iterator of a for: MEMORY CPU
local t = {} for k in function() t[#t + 1] = ('x'):rep(10000 + #t) return #t end do end

--- operations in a comparator without end: OPERATIONS CPU
while true do table.sort({3, 2, 1}, function(a, b) call(1) return a < b end) end

--- operations in gsub without end: OPERATIONS CPU
while true do (('x'):rep(50)):gsub('x', function() call(1) end) end

--- operations in __index without end: OPERATIONS CPU
local t = setmetatable({}, {__index = function() call(1) end}) while true do local _ = t.x end

--- operations in __close without end: OPERATIONS CPU
while true do local x <close> = setmetatable({}, {__close = function() call(1) end}) end

--- operations in xpcall handlers without end: OPERATIONS CPU
while true do xpcall(error, function() call(1) end) end

--- a result of tables that share: CPU MEMORY OUTPUT
local t = {} for i = 1, 50 do t = {t, t} end return t

--- a request of tables that share: CPU MEMORY OUTPUT
local t = {} for i = 1, 50 do t = {t, t} end call(t)

--- an error object of tables that share: CPU MEMORY
local t = {} for i = 1, 50 do t = {t, t} end error(t)

--- an error object of tables that share, in a branch of pcall: CPU MEMORY
local t = {} for i = 1, 50 do t = {t, t} end while true do pcall(error, t) end

--- an error object with a message that is no text: REFUSED
error(setmetatable({message = {}, code = function() end}, {__index = error}))

--- an error object with a message of a megabyte: REFUSED MEMORY CPU OUTPUT
error({message = ('x'):rep(1000000)})

--- an error object with a field that names a limit: REFUSED
error({limit = 'CPU', message = 'forged', type = 'LUA_LIMIT_CPU'})

--- an error object with names of the child's frames: REFUSED
error({kind = 'R', payload = '{}', traceback = {}, chunk = 5, line = 'x'})

--- a result whose fields are the child's: NOTHING
local r = call({kind = 'R', notes = '[]', memory = -1}) return r.memory ~= -1

--- a result with a NUL: REFUSED
return 'a\0b'

--- a result with a lone surrogate: REFUSED
return '\u{D800}'

--- a result with a code point beyond Unicode: REFUSED
return '\u{7FFFFFFF}'

--- a key with a NUL: REFUSED
return {['a\0b'] = 1}

--- a key that is a number and one that is its text: REFUSED
return {[1] = 'a', ['1'] = 'b'}

--- nan as a result: REFUSED
return 0 / 0

--- a number beyond 2^53: REFUSED
return math.maxinteger

--- rawset on null: NOTHING
rawset(null, 'x', 1) local r = call({null}) return r[1] ~= null

--- globals of others: NOTHING
return rawget(_G, 'before') or rawget(_G, 'reply') or rawget(string, 'mark') or rawget(table, 'mark')

--- a metatable for the globals: NOTHING
setmetatable(_G, {__index = function(_, name) return nil end}) return debug or io or package

--- a __newindex for the globals that the language writes: NOTHING
setmetatable(_G, {__newindex = function() error('x') end}) local ok = pcall(call, 1) return not ok

--- pcall, type and error replaced: NOTHING
pcall, type, error, next, pairs, tostring, select = nil, nil, nil, nil, nil, nil, nil
string.format, table.concat, table.unpack, math.type = nil, nil, nil, nil
local r = call({1, 2}) return r[2] ~= 2

--- coroutine replaced by one of its own: NOTHING
coroutine.resume = function() return true, 'forged' end coroutine.yield = function() return 'forged' end
return call('x') ~= 'x'

--- a chunk that is named as a trusted part: NOTHING
local _, e = load('x =', '=[language]:1:') return e:find('[language]', 1, true)

--- getmetatable of what the host gave: NOTHING
return getmetatable(call({1})) or getmetatable(call({a = 1}))

--- error with levels that do not exist: NOTHING
return pcall(error, 'x', 1 << 40) or pcall(error, 'x', -5) or pcall(error, 'x', math.mininteger)

--- select from the end of integers: NOTHING
return (pcall(select, math.mininteger, 1))

--- string.format with widths of every letter: NOTHING
for _, letter in ipairs({'d', 'i', 'u', 'c', 'x', 'X', 'o', 'e', 'E', 'f', 'g', 'G', 'a', 'A', 's', 'q'}) do
  pcall(string.format, '%99.99' .. letter, 1) pcall(string.format, '%-+ #099' .. letter, 1)
  pcall(string.format, '%' .. ('0'):rep(500) .. letter, 1) pcall(string.format, '%*' .. letter, 1, 1)
end

--- string.format with n and with what does not exist: NOTHING
return pcall(string.format, '%n', 1) or pcall(string.format, '%', 1) or pcall(string.format, '%ll', 1)

--- string.format of 1e308 with all its digits, again and again: CPU
while true do local s = string.format('%99.99f', 1e308) end

--- string.format of quoted text that grows: MEMORY CPU
local s = ('\0'):rep(8000000) return #string.format('%q%q%q', s, s, s)

--- numbers of many digits: CPU MEMORY
local s = ('1'):rep(4000000) while true do local n = tonumber(s) end

--- numbers of many digits by arithmetic: CPU MEMORY
local s = '0x' .. ('f'):rep(4000000) while true do local n = s + 1 end

--- a comparison of a long string with itself in sort: CPU MEMORY
local s = ('x'):rep(4000000) local t = {} for i = 1, 1000 do t[i] = s end while true do table.sort(t) end

--- keys that are long strings: CPU MEMORY
local t = {} for i = 1, 8 do t[('x'):rep(1000000) .. i] = 1 end while true do for k in pairs(t) do end end

--- string.byte of everything: REFUSED MEMORY CPU
return #{('x'):rep(8000000):byte(1, -1)}

--- utf8.codepoint of everything: REFUSED MEMORY CPU
return #{utf8.codepoint(('x'):rep(8000000), 1, -1)}

--- utf8.char of many: NOTHING
return #utf8.char(table.unpack(setmetatable({}, {__len = function() return 99999 end, __index = function() return 65
  end}))) > 100000

--- string.unpack of many: REFUSED MEMORY CPU
return select('#', string.unpack(('B'):rep(4000000), ('x'):rep(4000000)))

--- string.pack of a format without end: NOTHING
return string.pack(('!16 Xd'):rep(1000000)) ~= ''

--- string.packsize around the end of integers: REFUSED
return string.packsize('c2147483647c2147483647')

--- string.unpack at positions that do not exist: REFUSED
return string.unpack('i4', 'xxxx', math.maxinteger)

--- string.sub around the end of integers: NOTHING
return ('abc'):sub(math.mininteger, math.mininteger) ~= ''

--- string.rep with a separator around the end of integers: REFUSED
return ('x'):rep(math.maxinteger, 'y')

--- a table of 2^26 slots by its constructor: REFUSED MEMORY CPU
return #load('return {' .. ('1,'):rep(8000000) .. '}')()

--- a table whose border is searched for: CPU
local t = {} t[1 << 40] = 1 for i = 1, 40 do t[1 << i] = 1 end while true do local n = #t end

--- a for loop to the end of integers: CPU
for i = math.mininteger, math.maxinteger do end

--- a for loop by nothing: REFUSED
for i = 1, 2, 0 do end

--- a for loop of floats that never moves: CPU
for i = 2^53, 2^53 + 10 do i = i - 1 end while true do for i = 1, math.huge do end end

--- varargs through a thousand functions: REFUSED MEMORY CPU
local function f(n, ...) if n == 0 then return select('#', ...) end return f(n - 1, n, ...) end
for i = 1, 1e9 do f(5000) end

--- a program that loads itself: CPU MEMORY
local s = 'while true do load(...)(...) end' load(s)(s)

--- a label named as a keyword of the host: NOTHING
return (load('goto __TOKEN'))

--- integer division and modulo by nothing: REFUSED
return 1 // 0

--- shifts beyond the width: NOTHING
return (1 << 64) ~= 0 or (1 << -64) ~= 0 or (-1 >> 63) ~= 1

--- math.random with the widest range: NOTHING
in_checkpoint(true) return math.type(math.random(math.mininteger, math.maxinteger)) ~= 'integer'

--- math.random with an empty range: REFUSED
return math.random(2, 1)

--- os.time of a table that overflows: REFUSED NOTHING
return os.time({year = 1 << 40, month = 1, day = 1}) and nil

--- os.time of a table with fields that call: REFUSED NOTHING CPU
return os.time(setmetatable({}, {__index = function() while true do end end})) and nil

--- os.date of the widest format: REFUSED MEMORY CPU OUTPUT
return #os.date(('%c'):rep(1000000), 0)

--- a coroutine that resumes itself: NOTHING
local co co = coroutine.create(function() return coroutine.resume(co) end)
local _, ok = coroutine.resume(co) return ok

--- a coroutine that closes itself: NOTHING
local co co = coroutine.create(function() return (pcall(coroutine.close, co)) end)
local _, ok = coroutine.resume(co) return ok

--- a coroutine that closes its parent: NOTHING
local parent parent = coroutine.create(function()
  return coroutine.wrap(function() return (pcall(coroutine.close, parent)) end)() end)
local _, ok = coroutine.resume(parent) return ok

--- a wrap that is called from inside itself: NOTHING
local f f = coroutine.wrap(function() return (pcall(f)) end) return f()

--- a coroutine that waits, closed from a branch: NOTHING
local co
spawn(function() return (pcall(coroutine.close, co)) end)
co = coroutine.create(function() return call('wait') end)
local _, reply = coroutine.resume(co) return reply ~= 'wait'

--- yields across pcall in a coroutine, without end: CPU MEMORY
local function f() pcall(function() coroutine.yield() f() end) end
local co = coroutine.wrap(f) while true do co() end

--- yields across sort: NOTHING
local co = coroutine.wrap(function() table.sort({3, 2, 1}, function(a, b) coroutine.yield() return a < b end) return 1
  end)
local last while last == nil do last = co() end return last ~= 1
