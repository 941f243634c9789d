-- A third list, in kinds that the first two do not have: loops of C that no hook interrupts, buffers that grow inside one
-- call, to-be-closed values of coroutines and of for, metamethods that jump, sizes at the end of integers, and texts that
-- look like what the child says.

--- an empty text repeated without end: NOTHING REFUSED CPU
return ('' ):rep(1 << 62) ~= ''

--- an empty text repeated with an empty separator: NOTHING REFUSED CPU
return ('' ):rep(math.maxinteger, '') ~= ''

--- a plain search of a long text in a long text: NOTHING CPU MEMORY
return (('a'):rep(1000000)):find(('a'):rep(500000) .. 'b', 1, true)

--- table.concat of one long text many times: MEMORY CPU REFUSED
local s, t = ('x'):rep(1000000), {} for i = 1, 4096 do t[i] = s end return #table.concat(t)

--- table.concat of a table that has everything: MEMORY CPU REFUSED
local t = setmetatable({}, {__index = function() return 'x' end}) return #table.concat(t, '', 1, math.maxinteger)

--- table.concat at the end of integers: NOTHING
local t = setmetatable({}, {__index = function() return '' end})
return table.concat(t, '', math.maxinteger, math.maxinteger) ~= ''

--- table.concat over all integers: REFUSED NOTHING CPU MEMORY
return #table.concat({}, 'x', math.mininteger, math.maxinteger) > 0 and nil

--- format of what becomes a long text, again and again: MEMORY CPU REFUSED
local m = setmetatable({}, {__tostring = function() return ('x'):rep(4000000) end})
return #string.format('%s%s%s%s%s%s%s%s', m, m, m, m, m, m, m, m)

--- a replacement that repeats the whole match: MEMORY CPU REFUSED
return #(('x'):rep(1000000):gsub('.+', ('%0'):rep(100)))

--- a replacement table that grows: MEMORY CPU REFUSED
local kept = {}
local t = setmetatable({}, {__index = function(_, k) kept[#kept + 1] = ('y'):rep(10000) .. #kept return kept[#kept] end})
return #(('x'):rep(100000):gsub('.', t))

--- a number of replacements at the end of integers: NOTHING
return (('abc'):gsub('.', 'x', math.mininteger)) ~= 'abc' or (('abc'):gsub('.', 'x', math.maxinteger)) ~= 'xxx'

--- gmatch from a place that does not exist: NOTHING
return (('abc'):gmatch('.', math.maxinteger))() or (('abc'):gmatch('.', math.mininteger))() ~= 'a'

--- a coroutine whose __close yields when it is closed: NOTHING REFUSED
local co = coroutine.create(function()
  local x <close> = setmetatable({}, {__close = function() coroutine.yield('out') end}) coroutine.yield() end)
coroutine.resume(co) coroutine.close(co) return coroutine.status(co) ~= 'dead'

--- a coroutine whose __close asks the host: NOTHING REFUSED
local co = coroutine.create(function()
  local x <close> = setmetatable({}, {__close = function() call('closing') end}) coroutine.yield() end)
coroutine.resume(co) local ok = coroutine.close(co) return coroutine.status(co) ~= 'dead'

--- errors in __close of errors in __close: NOTHING
local function deep(n)
  local x <close> = setmetatable({}, {__close = function(_, e) error({e, n}) end})
  if n > 0 then return (deep(n - 1)) end
  error('first')
end
return (pcall(deep, 100))

--- wraps that are closed by errors without end: CPU MEMORY
while true do
  local f = coroutine.wrap(function()
    local x <close> = setmetatable({}, {__close = function() error('x') end}) error('y') end)
  pcall(f)
end

--- a __close of a for that never ends: CPU
for k in next, {}, nil, setmetatable({}, {__close = function() while true do end end}) do end

--- coroutines that wait with values to close: MEMORY CPU REFUSED
local kept = {}
for i = 1, 1e6 do
  local co = coroutine.create(function() local x <close> = setmetatable({}, {__close = error}) coroutine.yield() end)
  coroutine.resume(co) kept[i] = co
end
return kept

--- goto around pcall in __index: CPU MEMORY
local t t = setmetatable({}, {__index = function(s, k) ::again:: pcall(function() return s[k] end) goto again end})
return t.x

--- goto around an error in __lt of sort: CPU
local m = {__lt = function(a, b) ::again:: pcall(error, 'x') goto again end}
table.sort({setmetatable({}, m), setmetatable({}, m)})

--- a __lt that errors in sort: NOTHING
local m = {__lt = function() error('mine') end}
return (pcall(table.sort, {setmetatable({}, m), setmetatable({}, m)}))

--- a comparator that is always true: NOTHING REFUSED
local t = {} for i = 1, 1000 do t[i] = i end table.sort(t, function() return true end) return nil

--- a comparator that empties what is sorted: NOTHING REFUSED
local t = {} for i = 1, 1000 do t[i] = i end
table.sort(t, function(a, b) for i = 1, 1000 do t[i] = nil end return (a or 0) < (b or 0) end) return nil

--- a comparator that leaves by a wrap: NOTHING
local f = coroutine.wrap(function() table.sort({2, 1}, function(a, b) coroutine.yield('out') return a < b end) end)
return f() ~= 'out' or f() ~= nil

--- a chain of __index of ten thousand: REFUSED NOTHING
local t = {} for i = 1, 10000 do t = setmetatable({}, {__index = t}) end return t.x

--- __index in a circle: REFUSED
local a, b = {}, {} setmetatable(a, {__index = b}) setmetatable(b, {__index = a}) return a.x

--- __newindex in a circle: REFUSED
local a, b = {}, {} setmetatable(a, {__newindex = b}) setmetatable(b, {__newindex = a}) a.x = 1

--- globals whose __index is themselves: REFUSED
setmetatable(_ENV, {__index = _ENV}) return a_name_that_is_not_there

--- __call in a circle: REFUSED CPU MEMORY
local t = {} setmetatable(t, {__call = t}) return t()

--- __concat of two hundred operands that grow: MEMORY CPU REFUSED
local m m = setmetatable({}, {__concat = function(a, b) return ('x'):rep(10000000) end})
return #(m .. m .. m .. m .. m .. m .. m .. m .. m .. m .. m .. m .. m .. m .. m .. m .. m)

--- __len at the end of integers for insert: REFUSED NOTHING
table.insert(setmetatable({}, {__len = function() return math.maxinteger end}), 1) return nil

--- __len at the end of integers for insert in the middle: REFUSED CPU
table.insert(setmetatable({}, {__len = function() return math.maxinteger - 1 end}), 1, 1)

--- __len at the end of integers for remove: REFUSED CPU
table.remove(setmetatable({}, {__len = function() return math.maxinteger end}), 1)

--- table.move of a trillion places: CPU MEMORY REFUSED
table.move({}, 1, 1 << 40, 2)

--- utf8.offset at the end of integers: NOTHING
return utf8.offset('abc', math.maxinteger) or utf8.offset('abc', math.mininteger)

--- utf8.codepoint over a range that does not exist: REFUSED
return utf8.codepoint('abc', 1, math.maxinteger)

--- utf8.len over bytes that are no text, without end: CPU MEMORY
local s = ('\u{7FFFFFFF}'):rep(1000000) while true do utf8.len(s, 1, -1, true) end

--- utf8.codes while its text is long, without end: CPU MEMORY
local s = ('\u{10FFFF}'):rep(1000000) while true do for p, c in utf8.codes(s) do end end

--- a packed text that says it is longer than memory: REFUSED
return string.unpack('s8', ('\255'):rep(8))

--- a packed text of a length that overflows: REFUSED
return string.unpack('<s8', '\255\255\255\255\255\255\255\127x')

--- many empty fields unpacked: REFUSED NOTHING MEMORY CPU
return select('#', string.unpack(('c0'):rep(300000), 'x')) and nil

--- a text padded to a gigabyte: REFUSED MEMORY CPU
return #string.pack('c1000000000', 'x')

--- load of pieces without end: MEMORY CPU REFUSED NOTHING
return (load(function() return ('x'):rep(10000) end))

--- load of a function that yields: NOTHING
local f = coroutine.wrap(function() return (pcall(load, function() coroutine.yield('out') end)) end)
local first = f() return first ~= 'out' and first ~= false and first ~= true

--- a chunk with a name of a megabyte: NOTHING
local _, e = load('x =', ('n'):rep(1000000)) return #e > 10000

--- an error handler that fails in itself: NOTHING
local function h() error(h) end return (xpcall(error, h))

--- an error handler that never ends: CPU
xpcall(error, function() while true do end end)

--- a number whose exponent is a megabyte: NOTHING CPU MEMORY
return tonumber('1e' .. ('9'):rep(1000000)) ~= math.huge and tonumber('1e' .. ('9'):rep(1000000)) ~= nil

--- a for loop with the widest step: NOTHING
local n = 0 for i = math.maxinteger, math.mininteger, math.mininteger do n = n + 1 end return n > 2

--- a table that grows while it is walked: CPU MEMORY REFUSED
local t = {x = 1} for k in pairs(t) do t[k .. 'x'] = 1 end while true do for k in pairs(t) do t[k .. #k] = 1 end end

--- next with a key that is not there: REFUSED NOTHING
return next({}, 'x')

--- a request that looks like a frame: NOTHING
local s = 'R\1\2\3\4\n{"kind":"R","payload":"x"}\r\n\r\nY' return call(s) ~= s

--- keys and lines that look like the next request: NOTHING
local s = '\n\n{"op":"tool","server":"bank"}\n\\u0000\\n' local r = call({[s] = s}) return r[s] ~= s

--- a length in front of a text: NOTHING
local s = ('\127'):rep(8) .. 'x' return call(s) ~= s

--- a request nested five thousand times: REFUSED CPU MEMORY OUTPUT
local t = {} for i = 1, 5000 do t = {t} end call(t)

--- a request that holds itself: REFUSED CPU MEMORY OUTPUT
local t = {} t.x = {y = t} call(t)

--- a key that is not a number: REFUSED
call({[0 / 0] = 1})

--- keys that are floats and whole: NOTHING
local r = call({[1] = 'a', [2.0] = 'b', [3] = 'c'}) return #r ~= 3 or r[2] ~= 'b'

--- a zero below zero: NOTHING
local r = call({-0.0}) return r[1] ~= 0

--- text that is no text, in an error: REFUSED
error('\255\254' .. ('\192\128'):rep(100))

--- text that is no text, as a request: REFUSED
call('\237\160\128')

--- a null with a method: REFUSED
return null:x()

--- every global called with every other: NOTHING CPU MEMORY REFUSED
local all = {} for _, v in pairs(_G) do all[#all + 1] = v end
for _, f in ipairs(all) do if type(f) == 'function' and f ~= call and f ~= spawn then
  for _, x in ipairs(all) do pcall(f, x) pcall(f, x, x) end end end
return debug or io or package
