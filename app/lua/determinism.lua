-- The functions whose answers differ from one attempt to the next: math.random, math.randomseed, os.time, os.date,
-- os.clock, os.getenv, os.tmpname. Inside a checkpoint they are what they say; outside, seeded or fixed, and told.
local raw, part = ...
local error, select, tonumber = raw.error, raw.select, raw.tonumber
local format, byte = raw.string.format, raw.string.byte
local text_of, integer_of, here, warn = part.text_of, part.integer_of, part.here, part.warn
local raw_os, raw_random, raw_randomseed = raw.os, raw.math.random, raw.math.randomseed

local draws = {}             -- the generator's four words (xoshiro256**), seeded for the run
local is_live, is_strict, epoch_s = false, false, 0

local function seed_draws(a, b)
  -- splitmix64, so that seeds that are close give streams that are not
  local word = a
  for index = 1, 4 do
    word = word + 0x9E3779B97F4A7C15
    local mixed = word ~ b
    mixed = (mixed ~ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ~ (mixed >> 27)) * 0x94D049BB133111EB
    draws[index] = mixed ~ (mixed >> 31)
  end
end

local function draw()
  local one, two, three, four = draws[1], draws[2], draws[3], draws[4]
  local word = two * 5
  word = ((word << 7) | (word >> 57)) * 9
  three, four = three ~ one, four ~ two
  draws[1], draws[2] = one ~ four, two ~ three
  draws[3], draws[4] = three ~ (two << 17), (four << 45) | (four >> 19)
  return word
end

local function seeded(...)
  local word, count = draw(), select("#", ...)
  if count == 0 then return (word >> 11) * (0.5 / (1 << 52)) end
  local low, high = ...
  if count == 1 then
    low, high = 1, integer_of(low, 1, "random")
    if high == 0 then return word end
  elseif count == 2 then
    low, high = integer_of(low, 1, "random"), integer_of(high, 2, "random")
  else
    error("wrong number of arguments", 3)
  end
  if low > high then error(format("bad argument #%d to 'random' (interval is empty)", count), 3) end
  local span = high - low
  if span & (span + 1) == 0 then return low + (word & span) end
  local mask = span
  for shift = 0, 5 do mask = mask | (mask >> (1 << shift)) end
  word = word & mask
  while raw.math.ult(span, word) do word = draw() & mask end
  return low + word
end

--- The program asks for what differs between attempts: told once a line, or stopped where the procedure is strict.
local function nondeterministic(name, instead)
  local chunk, line = here()
  local what = name .. " outside a checkpoint is not what it says: " .. instead
  if is_strict then
    local text = format("%s:%s: %s stands outside a checkpoint, and strict_determinism is on. Call it inside "
      .. "checkpoint(function() ... end), whose result is recorded", chunk or "?", line or "?", name)
    if part.host.refuse then part.host.refuse(text) end
    error(text, 0)
  end
  warn(line, what .. ". Call it inside checkpoint(function() ... end), whose result is recorded")
end

local maths = {}
for name, value in raw.next, raw.math do maths[name] = value end

function maths.random(...)
  if is_live then return raw_random(...) end
  nondeterministic("math.random", "it draws from the run's own seed")
  return seeded(...)
end

function maths.randomseed(...)
  if is_live then
    raw_randomseed(...)
    return
  end
  nondeterministic("math.randomseed", "it seeds the run's own draws")
  local a, b = ...
  if a == nil then a, b = draw(), draw() end
  local bits = raw.string.unpack("<i8", raw.string.pack("<n", tonumber(a) or 0))
  seed_draws(raw.math.tointeger(a) or bits, raw.math.tointeger(b) or 0)
end

local times = {}

function times.time(fields)
  if fields ~= nil then return raw_os.time(fields) end
  if is_live then return raw_os.time() end
  nondeterministic("os.time", "it is the time at which the run was made")
  return epoch_s
end

function times.date(template, at)
  template = template == nil and "%c" or text_of(template, 1, "date")
  if byte(template, 1) ~= 33 then template = "!" .. template end
  if at == nil then
    if is_live then
      at = raw_os.time()
    else
      nondeterministic("os.date", "it is the time at which the run was made")
      at = epoch_s
    end
  end
  if #template > 1000 then error("bad argument #1 to 'date' (at most 1000 characters expected)", 2) end
  return raw_os.date(template, at)
end

function times.clock()
  if is_live then return raw_os.clock() end
  nondeterministic("os.clock", "it is 0")
  return 0.0
end

function times.getenv(name)
  text_of(name, 1, "getenv")
  if not is_live then nondeterministic("os.getenv", "it is nil") end
  return nil
end

function times.tmpname()
  if is_live then return format("/tmp/lua_%08x", raw_random(0) & 0xFFFFFFFF) end
  nondeterministic("os.tmpname", "it is drawn from the run's own seed")
  return format("/tmp/lua_%08x", draw() & 0xFFFFFFFF)
end

function times.difftime(later, earlier)
  return raw_os.difftime(later, earlier == nil and 0 or earlier)
end

part.host.in_checkpoint = function(is_inside)
  is_live = is_inside and true or false
end

local function configure(settings, live_seed)
  is_strict, epoch_s = settings.strict, settings.epoch_s
  seed_draws(settings.seed[1], settings.seed[2])
  raw_randomseed(live_seed)
end

return maths, times, configure
