  end

  -- Decides the run, request by request. A request that fails has added nothing, and those after it are decided as if it had
  -- not been there.

  -- Most calls are one check of one charge.
  if requests == 1 and #ARGV == 1 and not all then
    local fine, admitted, remaining, wait, reset = pcall(rule, KEYS[1], times, nil, cost, quota, x, y, z)
    if fine then
      return pack('<ddddd', now, admitted, remaining, wait, reset)
    end
  end

  reply = reply or { pack('<d', now), false, false }
  local listed, finish = times == 0, passed + requests * size
  -- Checks of one charge are decided without a call of `pcall` for each.
  local checks = not all and function()
    local keys = KEYS
    for n = passed + 1, finish do
      if listed then
        times, position = unpack_numbers('<d', ARGV[run], position)
      end
      reply[n + 1] = pack('<dddd', rule(keys[n], times, nil, cost, quota, x, y, z))
      passed = n
    end
  end

  while passed < finish do
    local fine, failure
    if checks then
      fine, failure = pcall(checks)
    else
      if listed then
        times, position = unpack_numbers('<d', ARGV[run], position)
      end
      -- As after a charge that all callers fit.
      fits, following, at, banned, refunded_at = times, all, passed, false, admitted_at
      if reserve then
        reserve.turn = now
      end
      fine, failure = pcall(rest, 0, times, 0)
      if fine then
        passed = passed + size
      end
    end

    if not fine then
      -- From its code on, which may follow the line of the script.
      local message = tostring(failure)
      errors = errors or {}
      errors[#errors + 1] = string.match(message, '%u%u+ [^\r\n]*') or 'ERR ' .. message
      for place = 1, size do
        reply[1 + passed + place] = pack('<dddd', -#errors, 0, 0, 0)
      end
      passed = passed + size
    end
  end
end

local packed = reply and table.concat(reply, '', 1, passed + 1) or pack('<d', now)
if errors then
  return { packed, unpack(errors) }
end
return packed
