    -- The driver: decides run after run, request by request. A request is admitted when all of its charges fit, and only
    -- then is anything added. A request that fails has added nothing, and those after it are decided as if it had not been
    -- there.
    if operation == 'reset' then
      -- Nothing reads the key afterwards: where its slot is moving to another node, that would be an error.
      function rule(key, _, rest, cost, quota)
        rest(quota, 0, cost, quota)
        call('UNLINK', key)
        return 0, quota, 0, 0
      end
    end
    if size > 1 or operation ~= 'check' or role ~= '' then
      -- A charge that is only checked needs room once, not for each caller, and a refund needs none.
      local needs = operation == 'refund' and 0 or role == 'checked' and 1
      local charge = { rule, cost, quota, x, y, z, role, needs, false }
      if last then
        last[9] = charge
      end
      all, last = all or charge, charge
    end
  end

  if all and not rest then
    -- A charge without a role is counted. A `checked` one only needs room. One to count `once` is a marker, which does not
    -- deny: if it has counted before and has room, the next charge is exempt.
    function rest(room, fitting, cost, quota)
      local checked, marks, exempted = role == 'checked', role == 'once', exempt
      local full = marks and room < cost
      if not marks and not exempted and fitting < fits and not (checked and fitting > 0) then
        fits = fitting
      end

      local charge = following
      if charge then
        following, at, role, exempt = charge[9], at + 1, charge[7], marks and not full and room < quota
        local n = at + 1
        local _, remaining, wait, reset = charge[1](
          KEYS[at], charge[8] or times, rest, charge[2], charge[3], charge[4], charge[5], charge[6])
        reply[n] = pack('<dddd', fits, remaining, wait, reset)
      elseif operation ~= 'check' and (operation ~= 'peek' or fits > 0) then
        fits = times
      end

      if operation == 'refund' then
        return 0, false, not checked and admitted_at
      end
      local counts = (operation == 'check' or operation == 'charge') and not (checked or full or exempted)
      local counted = counts and fits or 0
      local denies = not marks and not exempted and fits < times and room - counted * cost < cost
      return counted, full or denies
    end
  end

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
      -- As after a charge for which all callers fit.
      fits, following, at, role, exempt = times, all, passed, '', false
      fine, failure = pcall(rest, 0, times, 0, 0)
      if fine then
        passed = passed + size
      end
    end

    if not fine then
      -- From its code on: since Redis 7 an error comes in a table; before, it may follow the script's line.
      local message = type(failure) == 'table' and failure.err or failure
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
