-- Slots: a sorted set with one member for each lease, scored with its expiry. A charge fits while the weights of the leases
-- that have not expired leave room for it. The id of a lease, which the client chooses, comes in place of two parameters.
--
-- The name of a member is four doubles: the two parts of the id, the length of the lease and its weight. While some
-- weigh more than 1, a member `#` at rank 0 has the score -(total weight - number of leases).

if concurrency then
  -- Finds those that have ended, which are removed later: those that have expired, and if more than `most` is held then, those of
  -- a clock that is gone.
  local function find_ended(held, most)
    -- Counts members as ended.
    local function end_all(members)
      for _, member in ipairs(members) do
        held.ended[#held.ended + 1] = member
        if held.marked > 0 then
          local _, _, _, weight = unpack_numbers('<dddd', member)
          held.total, held.extra = held.total - weight + 1, held.extra - weight + 1
        end
      end
      held.total = held.total - #members
    end

    -- Until when a member may be ahead of the clock. One that is ahead by less than its length may be alive: its next renewal is
    -- by the clock that was set back.
    local function latest(member)
      local _, _, length = unpack_numbers('<ddd', member)
      return now + 2 * length
    end

    if held.first_at and held.first_at <= now then
      end_all(call('ZRANGEBYSCORE', held.key, '(0', digits(now), 'LIMIT', '0', 'BOUND'))
    end
    if held.total <= most or held.newest <= now or held.newest <= latest(held.last) then
      return
    end
    -- The newest first.
    local after, gone = '(' .. digits(now), {}
    local members = call('ZREVRANGEBYSCORE', held.key, '+inf', after, 'WITHSCORES', 'LIMIT', '0', 'BOUND')
    held.newest = now
    for i = 1, #members, 2 do
      local at = tonumber(members[i + 1])
      if at <= latest(members[i]) then
        held.newest = at
        break
      end
      gone[#gone + 1] = members[i]
    end
    end_all(gone)
  end

  -- Reads what the leases of a key weigh, what of that is beyond 1 each, what `#` says of that, and when the last one expires.
  -- Finds those that have ended.
  local function read(key, weight, quota)
    local held = { key = key, total = call('ZCARD', key), extra = 0, marked = 0, newest = now, ended = {} }
    if held.total > 0 then
      local first, first_at, second, second_at = unpack(call('ZRANGE', key, '0', '1', 'WITHSCORES'))
      if first == '#' then
        held.extra, held.marked, held.total = -first_at, -first_at, held.total - 1 - first_at
        first, first_at = second, second_at
      end
      held.first_at = first and tonumber(first_at)
      local last_at
      held.last, last_at = unpack(call('ZRANGE', key, '-1', '-1', 'WITHSCORES'))
      held.newest = tonumber(last_at)
      if held.first_at and held.first_at <= now or held.total + weight > quota then
        find_ended(held, quota - weight)
      end
    end
    return held
  end

  -- Removes those that have ended, and writes what the others weigh, unless the operation only reads.
  local function remove_ended(held)
    if operation == 'peek' then
      return
    end
    if #held.ended > 0 then
      call('ZREM', held.key, unpack(held.ended))
      held.ended = {}
    end
    if held.extra ~= held.marked then
      if held.extra > 0 then
        call('ZADD', held.key, -held.extra, '#')
      else
        call('ZREM', held.key, '#')
      end
      held.marked = held.extra
    end
  end

  -- When the last lease expires.
  local function newest_of(key)
    return tonumber(call('ZRANGE', key, '-1', '-1', 'WITHSCORES')[2])
  end

  -- Adds a lease, or renews the one that expires at `held_until`.
  local function put(held, name, cost, length, held_until)
    if not held_until then
      held.total, held.extra = held.total + cost, held.extra + cost - 1
    end
    held.newest = math.max(held.newest, now + length)
    if held.extra > 0 and held.extra ~= held.marked then
      call('ZADD', held.key, now + length, name, -held.extra, '#')
      held.marked = held.extra
    else
      call('ZADD', held.key, now + length, name)
    end
    -- The one that was the last, where the clock was set back.
    if held_until and tonumber(held_until) > now + length then
      held.newest = newest_of(held.key)
    end
    call('PEXPIREAT', held.key, expiry(held.newest))
  end

  -- Removes a lease.
  local function remove(held, name, cost)
    call('ZREM', held.key, name)
    held.total, held.extra = held.total - cost, held.extra - cost + 1
    held.newest = held.total > 0 and newest_of(held.key) or now
  end

  -- Decides a charge of slots.
  function concurrency(key, times, finds, cost, quota, length, high, low, request)
    cost = math.min(cost, HEAVIEST)
    local held = read(key, times * cost, quota)
    local room = math.max(0, quota - held.total)
    local name, held_until = pack('<dddd', high, low, length, cost), false
    if finds and (operation == 'renew' or operation == 'end' or operation == 'refund') then
      remove_ended(held)
      held_until = call('ZSCORE', key, name)
    end

    local fits = room >= times * cost
    local counted, waits, ends = fits and times or 0, not fits, operation ~= 'refund'
    if finds then
      local own, refunded_at = held_until and operation == 'renew' and math.max(room, cost) or room, nil
      counted, waits, refunded_at = finds(request, own, held_until and times or counted, cost, quota)
      ends = ends or refunded_at
    end
    if counted > 0 or operation == 'renew' and (held_until or fits) then
      put(held, name, cost, length, held_until)
    elseif held_until and ends and operation ~= 'renew' then
      remove(held, name, cost)
    elseif waits then
      keep(key, held.newest)
    end
    -- A key that loses its last member cannot be created again on a node from which its slot is moving, so this is last.
    remove_ended(held)
    return counted, math.max(0, quota - held.total), waits and RETRY_US or 0, held.newest > now and held.newest - now or 0
  end
end
