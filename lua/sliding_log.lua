-- Sliding window log: a sorted set with one member for each admission, scored with its time. A charge fits while the
-- weights admitted within the last window leave room for it.
--
-- The name of a member is `time[~][:weight][-attempt]`. Members weigh 1 until a heavier one is added. As long as there are
-- heavier ones, a member `#`, kept at rank 0, has minus the total weight as its score. A weight is written with a letter for
-- its number of digits (`:a5`, `:b10`), so that members of one time are in the order of their weights.
--
-- Where a grain is given, admissions of one grain of time are one member, scored with the last of them. Without a grain,
-- charges beyond the limit are merged in the same way, in steps of a thousandth of the window, and `~` marks their members.

function algorithms.log(cost, quota, window, grain)
  local expired, expires = now - window, expiry(now + window)
  -- The time of which charges are one member.
  local step = grain > 0 and grain or ceil(window / STEPS)
  -- Of the members, `#` not among them: how many there are, what they weigh, how many have expired, how many belong to a
  -- clock that is gone, and how many may still be read or removed.
  local key, stored, total, late, gone, budget
  -- Whether the weights are counted, whether `#` holds them, and whether a member was added.
  local weighted, marked, added
  -- Whether all members have expired and are still there.
  local stale
  -- The times of the oldest and of the newest member, while they are known.
  local first, newest

  -- Names are read instead of scores, which Redis would have to print.
  local function time_of(member)
    return tonumber(member) or tonumber(string.match(member, '^%d+'))
  end

  local function weight_of(member)
    return tonumber(string.match(member, ':%a?(%d+)') or 1)
  end

  local function drop(from, upto)
    if weighted then
      local dropped = 0
      for _, member in ipairs(call('ZRANGE', key, from, upto)) do
        dropped = dropped + weight_of(member)
      end
      call('ZINCRBY', key, dropped, '#')
      total = total - dropped
    end

    call('ZREMRANGEBYRANK', key, from, upto)
    stored = stored - (upto - from + 1)
    budget = budget - (upto - from + 1)
  end

  -- After members were dropped: when all that are left weigh 1, weights are no longer counted, but members are. The last
  -- `#` stays: a key that is deleted cannot be created again on a node from which its slot is moving.
  local function recount()
    if weighted and stored == 0 then
      total = 0
    elseif weighted and stored == total and grain == 0 then
      call('ZREM', key, '#')
      weighted, marked = false, false
    end
    if not weighted then
      total = stored - late - gone
    end
  end

  -- Drops what has expired, oldest first, within the budget.
  local function settle()
    if not weighted and stored < budget - 1 then
      newest = time_of(call('ZRANGE', key, '-1', '-1')[1])
      if newest <= expired then
        -- Removed last, when another member keeps the key, for the reason given above.
        stale, stored, total, newest = true, 0, 0, nil
        return
      end
      local dropped = call('ZREMRANGEBYSCORE', key, '(0', text(expired))
      stored, total, budget = stored - dropped, total - dropped, budget - dropped
      return
    end

    local before = call('ZCOUNT', key, '(0', text(expired))
    local dropped = min(before, budget - 2)
    if dropped > 0 then
      local base = weighted and 1 or 0
      drop(base, base + dropped - 1)
    end
    late = before - dropped
    recount()
  end

  -- Adds a member at `at`, whatever else was added at that time, and writes the total down.
  local function insert(at, weight, beyond)
    local score = at == now and now_text or text(at)
    local name = beyond and score .. '~' or score
    if weight > 1 then
      local digits = string.format('%.0f', weight)
      name = name .. ':' .. string.char(96 + #digits) .. digits
    end

    -- A member of that name has that score, so adding it again changes nothing. Each attempt has another name, and
    -- there are no more than `stored` to meet.
    local member, attempt = name, stored
    while true do
      local fresh
      if weighted then
        fresh = call('ZADD', key, score, member, -total, '#') - (marked and 0 or 1)
        marked = true
      else
        fresh = call('ZADD', key, score, member)
      end
      if fresh > 0 then
        return
      end
      attempt = attempt + 1
      member = name .. '-' .. attempt
    end
  end

  local charge = { cost = cost, quota = quota }

  function charge.open(name)
    key = name
    stored = call('ZCARD', key)
    total, late, gone, budget = stored, 0, 0, BOUND - ENDS
    weighted, marked, added, stale, first, newest = false, false, false, false, nil, nil
    if stored > 0 then
      local oldest = call('ZRANGE', key, '0', '0')[1]
      if oldest == '#' then
        weighted, marked = true, true
        total = min(max(0, -tonumber(call('ZSCORE', key, '#'))), EXACT - 1)
        stored = stored - 1
        settle()
      else
        first = time_of(oldest)
        if first <= expired then
          first = nil
          settle()
        end
      end
    end
    return max(0, quota - total)
  end

  -- Drops what a clock that is gone has left, newest first: it lies too far ahead.
  function charge.reclaim()
    newest = stored > 0 and time_of(call('ZRANGE', key, '-1', '-1')[1])
    if newest and newest > now + min(SLACK, window) then
      newest = nil
      gone = call('ZCOUNT', key, '(' .. text(now + min(SLACK, window)), '+inf')
      local dropped = min(gone, budget - 2)
      if dropped > 0 then
        drop(-dropped, -1)
      end
      gone = gone - dropped
      recount()
    end
    return max(0, quota - total)
  end

  function charge.add(weight)
    -- Beyond the limit, which only charges go, one member holds those of one step: a flood of them adds few members.
    local beyond = grain == 0 and total >= quota and stored > 0
    -- Callers of the same check are a member each while they are few.
    local members = 1
    if not weighted and cost == 1 and weight <= FEW and grain == 0 and not beyond then
      members, weight = weight, 1
    elseif (weight > 1 or grain > 0 or beyond) and not weighted then
      weighted, total = true, stored
    end
    weight = max(1, min(weight, MAX_TOTAL - total))

    local at, merged = now, 0
    if grain > 0 or beyond then
      local from = now - now % step
      local limit = beyond and 1 or budget - 1
      for _, member in ipairs(call('ZREVRANGEBYSCORE', key, from + step - 1, from, 'LIMIT', '0', limit)) do
        if not beyond or string.find(member, '~', 1, true) then
          at = max(at, time_of(member))
          merged = merged + weight_of(member)
          call('ZREM', key, member)
          stored = stored - 1
        end
      end
      first = nil
    end
    for _ = 1, members do
      total = total + weight
      insert(at, merged + weight, beyond)
      stored = stored + 1
    end
    if stale then
      call('ZREMRANGEBYSCORE', key, '(0', text(expired))
    end
    call('PEXPIREAT', key, expires)
    first = first and min(first, now)
    added = true
  end

  -- The time of the member that frees so much weight, or, past the budget, of the last one looked at.
  local function frees(need)
    if not weighted then
      local rank = late + need - 1
      return rank == 0 and first or time_of(call('ZRANGE', key, rank, rank)[1])
    end

    -- Most waits are for one of the first.
    local at
    local from, size = 1, 8
    while from < budget do
      local upto = min(from + size, budget) - 1
      for _, member in ipairs(call('ZRANGE', key, from, upto)) do
        at = time_of(member)
        need = need - weight_of(member)
        if need <= 0 then
          return at
        end
      end
      if upto >= stored then
        break
      end
      from, size = upto + 1, size * 8
    end
    return at or now
  end

  function charge.wait()
    local need = min(total + cost - quota, total)
    if need <= 0 then
      return window
    end
    keep(key, now + window)
    return max(1, frees(need) + window - now)
  end

  -- The wait until the newest entry leaves. The last access to the key.
  function charge.reset()
    if added then
      return window
    end
    if stale then
      call('ZREMRANGEBYSCORE', key, '(0', text(expired))
    end
    if stored <= late + gone then
      return 0
    end
    local rank = -1 - gone
    newest = newest or time_of(call('ZRANGE', key, rank, rank)[1])
    return min(window, newest + window - now)
  end

  if not refunding then
    return charge
  end

  -- Takes weight back from what was added at that time, as far as it still counts.
  function charge.refund(admitted_at, weight)
    local left = weight
    newest = nil

    local function take_from(members, of_beyond)
      for _, member in ipairs(members) do
        local held = weight_of(member)
        local taken = min(left, held)
        if taken == 0 then
          break
        end
        local beyond = string.find(member, '~', 1, true)
        if beyond or not of_beyond then
          call('ZREM', key, member)
          total = total - taken
          left = left - taken
          if held > taken then
            insert(time_of(member), held - taken, beyond)
          else
            stored = stored - 1
            if weighted then
              call('ZINCRBY', key, taken, '#')
            end
          end
        end
      end
    end

    local exact = grain == 0
    local step_from = admitted_at - admitted_at % step
    local step_upto = step_from + step - 1
    local from, upto = exact and admitted_at or step_from, exact and admitted_at or step_upto
    local members = call('ZRANGEBYSCORE', key, max(from, expired + 1), upto, 'LIMIT', '0', budget - 1)
    take_from(members, false)
    -- A charge beyond the limit may have been merged with later ones.
    local reads = budget - 1 - #members
    if exact and left > 0 and stored > 0 and reads > 0 then
      from = max(admitted_at, expired) + 1
      take_from(call('ZREVRANGEBYSCORE', key, step_upto, from, 'LIMIT', '0', reads), true)
    end
    return max(0, quota - total)
  end

  return charge
end
