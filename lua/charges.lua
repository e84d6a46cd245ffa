-- Charges that do not decide alone: those of a request with several, or with bans, and of operations other than checks.
-- A request is admitted when all of its charges fit, and only then is anything added.
--
-- The rule of a charge calls a function of this file when it has read its key, with the request, the room, how many callers fit,
-- the cost, the quota, and when it fits if it may wait for that. The function decides the charges after this one, so all keys of a
-- request are read before anything is added to one. It returns how many callers are counted, whether the next one has to wait,
-- and for a refund when it was admitted.

-- The packed numbers of the call.
local reply

if rest then
  -- Decides the next charge.
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
      request.deciding, request.charge, request.place = charge, charge[C_NEXT], place
      local _, remaining, wait, reset = charge[C_RULE](
        keys[place],
        request.needs,
        rest,
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
    elseif
      operation == 'charge'
      or operation == 'refund'
      or operation == 'end'
      or operation == 'reset'
      or operation == 'ban'
    then
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

if turn_of then
  -- When a charge fits that lacks so many units now, if it may wait for that. `wait`, with these arguments, returns for how long,
  -- and false if that is only a lower bound.
  function turn_of(request, need, cost, quota, wait, ...)
    local charge = request.deciding
    if charge[C_LONGEST] == 0 or need > charge[C_WAITING] or cost > quota then
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
