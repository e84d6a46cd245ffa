-- Sliding window log: a sorted set with one member for each admission, scored with its time. A charge fits while the
-- weights admitted within the last window leave room for it.
--
-- A member is named after its time. Members weigh 1 until a heavier one is added: that one ends in `:weight`, and as long
-- as there are such, a member `#`, kept at rank 0, has minus the total weight as its score. Where a grain is given,
-- admissions of one grain of time are one member, scored with the last of them.

function algorithms.log(cost, quota, window, grain)
  local expired, expires = now - window, expiry(now + window)
  -- Of the members, `#` not among them: how many there are, what they weigh, how many have expired, how many belong to a
  -- clock that is gone, and how many may still be read or removed.
  local key, stored, total, late, gone, budget
  -- Whether the weights are counted, whether `#` holds them, and whether a member was added.
  local weighted, marked, added
  -- The times of the oldest and of the newest member, while they are known.
  local first, newest

  -- Names are read instead of scores, which Redis would have to print.
  local function time_of(member)
    return tonumber(member) or tonumber(string.match(member, '^%d+'))
  end

  local function weight_of(member)
    return tonumber(string.match(member, ':(%d+)$') or 1)
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

  -- Once something was dropped: weights are counted no more when all that are left are 1, and unless they are, members are.
  local function recount()
    if weighted and stored == 0 then
      call('DEL', key)
      weighted, marked = false, false
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
  local function insert(at, weight)
    local score = at == now and now_text or text(at)
    local suffix = weight > 1 and string.format(':%.0f', weight) or ''

    -- A member of that name has that score, so adding it again changes nothing. Each attempt has another name, and
    -- there are no more than `stored` to meet.
    local member, attempt = score .. suffix, stored
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
      member = score .. '-' .. attempt .. suffix
    end
  end

  local charge = { cost = cost }

  function charge.open(name)
    key = name
    stored = call('ZCARD', key)
    total, late, gone, budget = stored, 0, 0, BOUND
    weighted, marked, added, first, newest = false, false, false, nil, nil
    if stored > 0 then
      local oldest = call('ZRANGE', key, '0', '0')[1]
      if oldest == '#' then
        weighted, marked = true, true
        total = min(max(0, -tonumber(call('ZSCORE', key, '#'))), MAX_TOTAL)
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
      drop(-dropped, -1)
      gone = gone - dropped
      recount()
    end
    return max(0, quota - total)
  end

  function charge.add(weight)
    -- Beyond the limit, which only charges go, all are one member: no flood of them makes the log longer.
    local beyond = total >= quota and stored > 0
    -- Those who ask the same are a member each while they are few.
    local members = 1
    if not weighted and cost == 1 and weight <= FEW and grain == 0 and not beyond then
      members, weight = weight, 1
    elseif (weight > 1 or grain > 0 or beyond) and not weighted then
      weighted, total = true, stored
    end
    weight = max(1, min(weight, MAX_TOTAL - total))

    local from, upto
    if grain > 0 then
      from = now - now % grain
      upto = from + grain - 1
    elseif beyond then
      from = newest or time_of(call('ZRANGE', key, '-1', '-1')[1])
      upto = from
    end

    local at, merged = now, 0
    if from then
      for _, member in ipairs(call('ZREVRANGEBYSCORE', key, upto, from, 'LIMIT', '0', budget - 1)) do
        at = max(at, time_of(member))
        merged = merged + weight_of(member)
        call('ZREM', key, member)
        stored = stored - 1
      end
      first = nil
    end
    for _ = 1, members do
      total = total + weight
      insert(at, merged + weight)
      stored = stored + 1
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

  -- The wait until the newest entry leaves.
  function charge.reset()
    if added then
      return window
    end
    if stored <= late + gone then
      return 0
    end
    local rank = -1 - gone
    newest = newest or time_of(call('ZRANGE', key, rank, rank)[1])
    return min(window, newest + window - now)
  end

  -- Takes weight back from what was added at that time, as far as it still counts.
  function charge.refund(admitted_at, weight)
    local from, upto = admitted_at, admitted_at
    if grain > 0 then
      from = from - from % grain
      upto = from + grain - 1
    end
    local left = weight
    local members = call('ZRANGEBYSCORE', key, max(from, expired + 1), upto, 'LIMIT', '0', budget - 1)

    for _, member in ipairs(members) do
      local held = weight_of(member)
      local taken = min(left, held)
      if taken == 0 then
        break
      end
      call('ZREM', key, member)
      total = total - taken
      left = left - taken
      if held > taken then
        insert(time_of(member), held - taken)
      else
        stored = stored - 1
        if weighted then
          call('ZINCRBY', key, taken, '#')
        end
      end
    end

    if weighted and stored == 0 then
      call('DEL', key)
    end
    return max(0, quota - total)
  end

  return charge
end
