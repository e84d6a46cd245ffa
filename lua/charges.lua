-- Charges that do not decide alone: those of a request with several, or with bans, and of operations other than checks.
-- A request is admitted when all of its charges fit, and only then is anything added.
--
-- The rule of a charge calls `rest` when it has read its key, with the request, the room, how many callers fit, and the cost.
-- It decides the charges after this one, so all keys of a request are read before anything is added to one. It returns how many
-- callers are counted, whether the next one is denied, and for a refund when it was admitted. A charge with a line calls
-- `in_line`, see `lua/line.lua`.

-- The packed numbers of the call.
local reply

if rest then
  -- Decides the next charge.
  function rest(request, room, fitting, cost)
    local times, decided = request.times, request.deciding
    if fitting < request.fits then
      request.fits = fitting
    end
    -- A request does not wait for a charge without a line.
    request.may_wait = request.may_wait and (fitting >= times or not decided or decided[C_LINE])

    local charge, place = request.charge, request.place + 1
    if charge then
      local line = charge[C_LINE]
      request.deciding, request.charge, request.place = charge, charge[C_NEXT], place
      local _, remaining, wait, reset = charge[C_RULE](
        keys[place],
        request.needs,
        line and in_line or rest,
        charge[C_COST],
        charge[C_QUOTA],
        charge[C_X],
        charge[C_Y],
        charge[C_Z],
        request
      )
      if line then
        remaining, wait = after_line(request, charge, line, remaining, wait)
      end
      charge[C_RETRY] = wait
      reply[place + 1] = pack('<dddd', request.fits, remaining, wait, reset)
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
    local counts = operation == 'check' or operation == 'charge' or operation == 'wait'
    local counted = counts and request.fits or 0
    return counted, request.fits < times and room - counted * cost < cost, request.refunded_at
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
