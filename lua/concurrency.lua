-- Slots: a sorted set with one member for each lease, scored with its expiry. A charge fits while the weights of the leases
-- that have not expired leave room for it. The id of a lease, which the client chooses, comes in place of two parameters.
--
-- The name of a member is four doubles: the two parts of the id, the length of the lease and its weight. While some
-- weigh more than 1, a member `#` at rank 0 has the score -(total weight - number of leases).

if algorithm == 'concurrency' then
  if not concurrency then
    -- Lists members to drop, and returns what they weigh, and what of that is beyond 1 each.
    local function list(members, dropped, weighted)
      local beyond = 0
      for _, member in ipairs(members) do
        dropped[#dropped + 1] = member
        if weighted then
          local _, _, _, weight = unpack_numbers('<dddd', member)
          beyond = beyond + weight - 1
        end
      end
      return #members + beyond, beyond
    end

    local function drop(key, dropped)
      if #dropped > 0 then
        call('ZREM', key, unpack(dropped))
      end
    end

    local function mark(key, extra)
      if extra > 0 then
        call('ZADD', key, -extra, '#')
      else
        call('ZREM', key, '#')
      end
    end

    function concurrency(key, times, rest, cost, quota, length, high, low)
      if cost > HEAVIEST then
        cost = HEAVIEST
      end
      -- What all leases weigh, what of that is beyond 1 each, what `#` says of that, and when the last one expires.
      local total, extra, marked, newest = call('ZCARD', key), 0, 0, now
      -- The members that have expired or belong to a clock that is gone.
      local dropped = {}
      if total > 0 then
        local first, first_at, second, second_at = unpack(call('ZRANGE', key, '0', '1', 'WITHSCORES'))
        if first == '#' then
          extra, first, first_at = -first_at, second, second_at
          marked, total = extra, total - 1 + extra
        end
        if first and tonumber(first_at) <= now then
          local members = call('ZRANGEBYSCORE', key, '(0', now_text, 'LIMIT', '0', 'BOUND')
          local weight, beyond = list(members, dropped, marked > 0)
          total, extra = total - weight, extra - beyond
        end

        -- The times of others ahead of the clock by less than their lengths are left: their next renewals are by this clock.
        local last, last_at = unpack(call('ZRANGE', key, '-1', '-1', 'WITHSCORES'))
        newest = tonumber(last_at)
        if total + times * cost > quota and newest > now then
          local _, _, lease = unpack_numbers('<ddd', last)
          if newest > now + 2 * lease then
            local members = call('ZREVRANGEBYSCORE', key, '+inf', '(' .. now_text, 'WITHSCORES', 'LIMIT', '0', 'BOUND')
            local gone = {}
            newest = now
            for i = 1, #members, 2 do
              local at = tonumber(members[i + 1])
              _, _, lease = unpack_numbers('<ddd', members[i])
              if at <= now + 2 * lease then
                newest = at
                break
              end
              gone[#gone + 1] = members[i]
            end
            local weight, beyond = list(gone, dropped, marked > 0)
            total, extra = total - weight, extra - beyond
          end
        end
      end

      local name = pack('<dddd', high, low, length, cost)
      local held = false
      if operation == 'renew' or operation == 'end' or operation == 'refund' then
        drop(key, dropped)
        if extra ~= marked then
          mark(key, extra)
          marked = extra
        end
        dropped, held = {}, call('ZSCORE', key, name)
      end

      local room = quota - total
      if room < 0 then
        room = 0
      end
      local fits = room >= times * cost
      local counted, waits, ends = fits and times or 0, not fits, false
      if rest then
        local own, refunded_at = held and operation == 'renew' and math.max(room, cost) or room, nil
        counted, waits, refunded_at = rest(own, held and times or counted, cost, quota)
        ends = held and (refunded_at or operation == 'end')
      end

      if counted > 0 or operation == 'renew' and (held or fits) then
        if not held then
          total, extra = total + cost, extra + cost - 1
        end
        newest = math.max(newest, now + length)
        if extra > 0 and extra ~= marked then
          call('ZADD', key, now + length, name, -extra, '#')
          marked = extra
        else
          call('ZADD', key, now + length, name)
        end
        -- The one that was the last, where the clock was set back.
        if held and tonumber(held) > now + length then
          newest = tonumber(call('ZRANGE', key, '-1', '-1', 'WITHSCORES')[2])
        end
        call('PEXPIREAT', key, expiry(newest))
      elseif ends then
        call('ZREM', key, name)
        total, extra = total - cost, extra - cost + 1
        newest = total > 0 and tonumber(call('ZRANGE', key, '-1', '-1', 'WITHSCORES')[2]) or now
      elseif waits then
        keep(key, newest)
      end
      -- A key that loses its last member cannot be created again on a node from which its slot is moving, so this is last.
      if operation ~= 'peek' then
        drop(key, dropped)
        if extra ~= marked then
          mark(key, extra)
        end
      end

      room = quota - total
      if room < 0 then
        room = 0
      end
      return counted, room, waits and RETRY_US or 0, newest > now and newest - now or 0
    end
  end
  rule = concurrency
end
