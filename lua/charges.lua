-- Charges that do not decide alone: those of a request with several, of one with a role, and of operations other than checks.
-- A request is admitted when all of its charges fit, and only then is anything added.
--
-- The rule of a charge calls a function of this file when it has read its key, with the request, the room, how many callers fit,
-- the cost, the quota, and when it fits if it may wait for that. The function decides the charges after this one, so all keys of a
-- request are read before anything is added to one. It returns how many callers are counted, whether the next one has to wait,
-- and for a refund when it was admitted.

-- By role: none is `rest`.
local checked, exempt, marker
-- The packed numbers of the call.
local reply

if rest then
  -- For a charge that is counted: decides the next charge.
  function rest(request, room, fitting, cost, _, own_turn)
    local times = request.times
    if own_turn then
      fitting, request.turn = times, math.max(request.turn, own_turn)
    end
    if fitting < request.fits then
      request.fits = fitting
    end

    local charge, place = request.charge, request.place + 1
    if charge then
      local finds = charge[C_FINDS]
      if request.is_exempt then
        finds, request.is_exempt = exempt, nil
      end
      request.deciding, request.charge, request.place = charge, charge[C_NEXT], place
      local _, remaining, wait, reset = charge[C_RULE](
        keys[place],
        charge[C_NEEDS] or times,
        finds,
        charge[C_COST],
        charge[C_QUOTA],
        charge[C_X],
        charge[C_Y],
        charge[C_Z],
        request
      )
      charge[C_RETRY] = wait
      reply[place + 1] = pack('<dddd', request.fits, remaining, wait, reset)
    elseif request.lacks_slots and request.fits > 0 and request.turn <= now then
      -- It waits for slots, and nothing of it is counted meanwhile.
      request.fits, request.queues = 0, true
    elseif operation == 'charge' or operation == 'refund' or operation == 'end' or operation == 'reset' then
      -- These do not require room.
      request.fits = times
    elseif operation == 'peek' and request.fits > 0 then
      request.fits = times
    end
    local counts = operation == 'check' or operation == 'charge' or operation == 'reserve'
    local counted = counts and request.fits or 0
    -- One that would wait does not deny.
    local waits = request.fits < times and not own_turn and room - counted * cost < cost
    return counted, waits, request.refunded_at
  end
end

if has_roles then
  -- For a charge that is only checked.
  function checked(request, room, fitting, cost)
    rest(request, room, fitting > 0 and request.times or 0, cost)
    return 0, request.fits < request.times and room < cost
  end

  -- For a charge that a marker exempts: it neither counts nor denies.
  function exempt(request, room, _, cost)
    rest(request, room, request.times, cost)
    return 0, false
  end

  -- For a charge to count once, which is a marker. It does not deny, and it counts with the next charge. If it has counted
  -- before and has room, that one is exempt.
  function marker(request, room, _, cost, quota)
    local full, marked = room < cost, request.charge
    if operation == 'refund' or operation == 'end' then
      -- What was charged for a request has admitted its repetitions too.
      if marked and room + 1 < quota then
        request.refunded_at = nil
      end
      return rest(request, room, request.times, cost)
    end
    local counts = not full and marked and marked[C_FINDS] == rest
    if not full and marked and marked[C_FINDS] ~= marker and room < quota then
      request.is_exempt = true
    end
    local counted = rest(request, room, request.times, cost)
    -- The repetitions of a request that waits would be admitted before it.
    if operation == 'reserve' and request.turn > now and room == quota then
      counts = false
    end
    return counts and counted or 0, full
  end
end

if turn_of then
  -- When a charge fits that lacks so many units now, if it may wait for that. `wait`, with these arguments, returns for how long,
  -- and false if that is only a lower bound.
  function turn_of(request, need, cost, quota, wait, ...)
    local charge = request.deciding
    if charge[C_FINDS] ~= rest or charge[C_LONGEST] == 0 or need > charge[C_WAITING] or cost > quota then
      return nil
    end
    local time, is_known = wait(...)
    return is_known ~= false and time <= charge[C_LONGEST] and now + time or nil
  end
end

if reset_key then
  -- Resets a key. Nothing reads it afterwards: where its slot is moving to another node, that would be an error.
  function reset_key(key, _, rest, cost, quota, _, _, _, request)
    rest(request, quota, request.times, cost, quota)
    call('UNLINK', key)
    return 0, quota, 0, 0
  end
end
