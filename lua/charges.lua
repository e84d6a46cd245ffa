-- Charges that do not decide alone: those of a request with several, of one with a role, and of operations other than checks.
-- A request is admitted when all of its charges fit, and only then is anything added.

if size > 1 or operation ~= 'check' or role ~= '' then
  if not rest then
    function rest(room, fitting, cost, _, own_turn)
      if own_turn then
        fitting, reserve.turn = times, math.max(reserve.turn, own_turn)
      end
      if fitting < fits then
        fits = fitting
      end

      local charge = following
      if charge then
        local n = at + 1
        following, at = charge[C_NEXT], n
        if reserve then
          reserve.charge = charge
        end
        local _, remaining, wait, reset =
          charge[C_RULE](
            KEYS[n],
            charge[C_NEEDS] or times,
            charge[C_FINDS],
            charge[C_COST],
            charge[C_QUOTA],
            charge[C_X],
            charge[C_Y],
            charge[C_Z],
            reserve
          )
        reply[n + 1] = pack('<dddd', fits, remaining, wait, reset)
      elseif operation ~= 'check' and operation ~= 'renew' and not reserve and (operation ~= 'peek' or fits > 0) then
        fits = times
      end

      local counted = (operation == 'check' or operation == 'charge' or reserve) and fits or 0
      -- One that would wait does not deny.
      return counted, fits < times and not own_turn and room - counted * cost < cost, refunded_at
    end
  end

  if role ~= '' and not marker then
    -- For a charge that is only checked.
    function checked(room, fitting, cost)
      rest(room, fitting > 0 and times or 0, cost)
      return 0, fits < times and room < cost
    end

    -- For a charge that a marker exempts: it neither counts nor denies.
    local function exempt(room, _, cost)
      rest(room, times, cost)
      return 0, false
    end

    -- For a charge to count once, which is a marker. It does not deny, and it counts with the next charge. If it has counted
    -- before and has room, that one is exempt.
    function marker(room, _, cost, quota)
      local full, marked = room < cost, following
      if operation == 'refund' or operation == 'end' then
        -- What was charged for a request has admitted its repetitions too.
        if following and room + 1 < quota then
          refunded_at = nil
        end
        return rest(room, times, cost)
      end
      local counts = not full and marked and marked[C_FINDS] == rest
      if not full and marked and marked[C_FINDS] ~= marker and room < quota then
        following = { unpack(marked) }
        following[C_FINDS] = exempt
      end
      local counted = rest(room, times, cost)
      -- The repetitions of a request that waits would be admitted before it.
      if reserve and reserve.turn > now and room == quota then
        counts = false
      end
      return counts and counted or 0, full
    end
  end

  reserve = nil
  if operation == 'reserve' then
    if not reservations then
      -- The charge of the key that was read last, and when the charges so far fit.
      reservations = { charge = nil, turn = now }

      -- When a charge fits that lacks so many units now, if it may wait for that. `wait`, with these arguments, returns for how
      -- long, and whether that is only a lower bound.
      function reservations.turn_of(need, cost, quota, wait, ...)
        local charge = reserve.charge
        if charge[C_FINDS] ~= rest or charge[C_LONGEST] == 0 or need > charge[C_WAITING] or cost > quota then
          return nil
        end
        local time, is_bound = wait(...)
        return not is_bound and time <= charge[C_LONGEST] and now + time or nil
      end
    end
    reserve = reservations
  end

  if operation == 'reset' then
    -- Nothing reads the key afterwards: where its slot is moving to another node, that would be an error.
    function rule(key, _, rest, cost, quota)
      rest(quota, times, cost, quota)
      call('UNLINK', key)
      return 0, quota, 0, 0
    end
  end

  local finds = role == 'checked' and checked or role == 'once' and marker or rest
  -- A charge that is only checked needs room once, not for each caller, and a refund and the end of a lease need none.
  local needs = (operation == 'refund' or operation == 'end') and 0 or role == 'checked' and 1
  local charge = { rule, cost, quota, x, y, z, finds, needs, false }
  if reserve then
    charge[C_LONGEST], charge[C_WAITING], position = unpack_numbers('<dd', ARGV[run], position)
  end
  if last then
    last[C_NEXT] = charge
  end
  all, last = all or charge, charge
end
