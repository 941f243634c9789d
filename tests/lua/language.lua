-- The smallest language: the program sees the host itself. For tests of the sandbox, not of procedures.
local host = ...
return function(input)
  local env = host.env
  env.call, env.spawn, env.null, env.array = host.call, host.spawn, host.null, host.array
  env.in_checkpoint, env.here, env.warn, env.input = host.in_checkpoint, host.here, host.warn, input
  return host.chunk("main")()
end
