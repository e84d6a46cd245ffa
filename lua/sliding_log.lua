-- Sliding window log: a sorted set with one member for each admission, scored with its time. A charge fits while the
-- weights admitted within the last window leave room for it.
--
-- The name of a member is `time[@made][~][:weight][-attempt]`. Members weigh 1 until a heavier one is added. As long as there
-- are heavier ones, a member `#`, kept at rank 0, has minus the total weight as its score. A weight is written with a letter
-- for its number of digits (`:a5`, `:b10`), so that members of one time are in the order of their weights.
--
-- A reservation is a member in the future, and `@` is before the time when it was made. Where there may be some, there is a
-- `#`, whose score is lower by a half.
--
-- Where a grain is given, admissions of one grain of time are one member, scored with the last of them. Without a grain,
-- charges beyond the limit are merged in the same way, in steps of a fraction of the window, and `~` marks their members.

if algorithm == 'log' then
  if not log then
    -- As text, of which Lua's own conversion keeps 14 digits: when keys expire, and up to which time members have expired.
    local expires_at, expires_text, expired_at, expired_text

    -- The time and the weight of a member. Names are read instead of scores, which Redis would have to print.
    local function parts_of(member)
      local plain_at = tonumber(member)
      if plain_at then
        return plain_at, 1
      end
      local member_at, weight = string.match(member, '^(%d+)@?%d*~?:?%a?(%d*)')
      return tonumber(member_at), tonumber(weight) or 1
    end

    -- Drops `count` members from this rank on, and returns how many are stored, what they weigh, and whether weights are
    -- counted, and a half if there may be reservations: one whose turn has come is an admission like others. If all that are
    -- stored weigh 1, members are counted instead, apart from those that count no more but could not be dropped. The last `#`
    -- stays: a key that is deleted cannot be created again on a node from which its slot is moving.
    local function drop(key, from, count, stored, total, weighted, grain, uncounted, half)
      if count > 0 then
        local upto = from + count - 1
        if weighted then
          local dropped = 0
          for _, member in ipairs(call('ZRANGE', key, from, upto)) do
            local _, weight = parts_of(member)
            dropped = dropped + weight
          end
          call('ZINCRBY', key, dropped, '#')
          total = total - dropped
        end
        call('ZREMRANGEBYRANK', key, from, upto)
        stored = stored - count
      end

      local arrived = half > 0 and stored > 0 and parts_of(call('ZRANGE', key, '-1', '-1')[1]) <= now
      if weighted and stored == 0 then
        total = 0
      elseif weighted and stored == total and grain == 0 and (half == 0 or arrived) then
        call('ZREM', key, '#')
        weighted, half = false, 0
      elseif arrived then
        call('ZINCRBY', key, half, '#')
        half = 0
      end
      return stored, weighted and total or stored - uncounted, weighted, half
    end

    function log(key, times, rest, cost, quota, window, grain, grain_now, reserve)
      local expired, budget = now - window, BUDGET
      -- Of the members, `#` not among them: how many there are, what they weigh, how many have expired, and how many belong
      -- to a clock that is gone. A half if there may be reservations.
      local stored = call('ZCARD', key)
      local total, late, gone, half = stored, 0, 0, 0
      -- Whether `#` has the total, whether the member of this check is added already, whether all members have expired and are
      -- still there; the times of the oldest and of the newest member, while they are known.
      local weighted, held, stale, first, newest

      if stored > 0 then
        local members = call('ZRANGE', key, '0', grain > 0 and '1' or '0')
        local oldest = members[1]
        if oldest == '#' then
          weighted, stored, oldest = true, stored - 1, members[2]
          total = -tonumber(call('ZSCORE', key, '#'))
          if not (total >= 0 and total < EXACT) then
            total = total > 0 and EXACT - 1 or 0
          end
          half = total % 1
          total = total - half
        end
        first = oldest and (tonumber(oldest) or parts_of(oldest))
      end

      -- Drops what has expired, oldest first, within the budget.
      if weighted and not first or first and first <= expired then
        first = nil
        if expired_at ~= expired then
          local upto = math.max(0, expired)
          expired_at, expired_text = expired, string.format('%d%06d', (upto - upto % 1000000) / 1000000, upto % 1000000)
        end
        if weighted or stored > budget - 2 then
          late = call('ZCOUNT', key, '(0', expired_text)
          local count = math.min(late, budget - 2)
          late, budget = late - count, budget - count
          stored, total, weighted, half = drop(key, weighted and 1 or 0, count, stored, total, weighted, grain, late, half)
        else
          -- A key that loses its last member cannot be created again on a node from which its slot is moving. So a check that
          -- decides alone adds its member first; else, if all have expired, they are dropped last.
          held = not rest and cost == 1 and times == 1 and grain == 0 and call('ZADD', key, now_text, now_text) > 0
          newest = not held and (parts_of(call('ZRANGE', key, '-1', '-1')[1]))
          if newest and newest <= expired then
            stale, stored, newest = true, 0, nil
          else
            local dropped = call('ZREMRANGEBYSCORE', key, '(0', expired_text)
            stored, budget = stored - dropped, budget - dropped
          end
          total = stored
        end
      end

      local room, counted = quota - total, times
      if room < times * cost then
        if held then
          held = call('ZREM', key, now_text) == 0
        end
        -- Drops what a clock that is gone has left, newest first: it lies too far ahead.
        if times > 0 and stored > 0 then
          newest = newest or parts_of(call('ZRANGE', key, '-1', '-1')[1])
          local ahead = newest > now and now + math.min(SLACK, window)
          if ahead and newest > ahead and half > 0 then
            newest = nil
            -- Drops members after `ahead`, newest first, except for the reservations of this clock.
            local function is_reserved(member)
              local made = string.match(member, '@(%d+)')
              return made and tonumber(made) <= ahead
            end
            -- Where both ends belong to this clock, none is looked for between them: a long queue would be read each time.
            local after = '(' .. string.format('%.0f', ahead)
            local lowest = call('ZRANGEBYSCORE', key, after, '+inf', 'LIMIT', '0', '1')[1]
            if not (is_reserved(lowest) and is_reserved(call('ZRANGE', key, '-1', '-1')[1])) then
              local members = call('ZREVRANGEBYSCORE', key, '+inf', after, 'LIMIT', '0', budget - 2)
              local dropped, weights = {}, 0
              for _, member in ipairs(members) do
                if not is_reserved(member) then
                  local _, weight = parts_of(member)
                  dropped[#dropped + 1], weights = member, weights + weight
                end
              end
              gone = #dropped == #members and call('ZCOUNT', key, after, '+inf') - #dropped or 0
              if #dropped > 0 then
                call('ZREM', key, unpack(dropped))
                call('ZINCRBY', key, weights, '#')
              end
              budget, stored, total = budget - #members, stored - #dropped, total - weights
              stored, total, weighted, half = drop(key, 0, 0, stored, total, weighted, grain, late + gone, half)
              room = quota - total
            end
          elseif ahead and newest > ahead then
            newest = nil
            gone = call('ZCOUNT', key, '(' .. string.format('%.0f', ahead), '+inf')
            local count = math.min(gone, budget - 2)
            gone, budget = gone - count, budget - count
            stored, total, weighted = drop(key, -count, count, stored, total, weighted, grain, late + gone, half)
            room = quota - total
          end
        end
        room = room > 0 and room or 0
        if room < times * cost then
          counted = (room - room % cost) / cost
        end
      end

      local waits = counted < times
      -- A member to add whose weight is written down: its time, its weight, whether it is of charges beyond the limit, and `@`
      -- with the time when it was made if it is the rest of a reservation.
      local member_at, weight, beyond, made
      -- Whether there is `#`.
      local marked

      if rest then
        local own_turn, refunded_at
        if reserve and waits and grain == 0 and late + gone == 0 then
          own_turn = reserve.turn_of(key, cost - (quota - total), cost, quota, window, grain, grain_now)
        end
        counted, waits, refunded_at = rest(room, counted, cost, quota, own_turn)

        -- Reserves: adds a member that counts later.
        if reserve and counted > 0 and reserve.turn > now and grain == 0 then
          local turn = reserve.turn
          local score = string.format('%.0f', turn)
          local name = score .. '@' .. now_text
          if cost > 1 then
            local digits = string.format('%.0f', cost)
            name = name .. ':' .. string.char(96 + #digits) .. digits
          end
          local member, attempt = name, stored
          while call('ZADD', key, score, member, -(total + cost) - 0.5, '#') == (weighted and 0 or 1) do
            weighted, attempt = true, attempt + 1
            member = name .. '-' .. attempt
          end
          if stale then
            call('ZREMRANGEBYSCORE', key, '(0', expired_text)
          end
          local newest = call('ZRANGE', key, '-1', '-1')[1]
          local last, made = parts_of(newest), string.match(newest, '@(%d+)')
          call('PEXPIREAT', key, expiry(last + window))
          local is_reserved = made and tonumber(made) <= now + math.min(SLACK, window)
          return counted, math.max(0, room - cost), now - turn, is_reserved and last + window - now or window
        end

        -- Takes weight back from what was added at that time, as far as it still counts.
        if refunded_at then
          local left, step = cost, grain > 0 and grain or math.ceil(window / STEPS)
          marked = weighted
          local function take_back(members, of_beyond)
            for _, member in ipairs(members) do
              local is_beyond = string.find(member, '~', 1, true)
              if left > 0 and (is_beyond or not of_beyond) then
                local taken_at, held = parts_of(member)
                local taken = math.min(left, held)
                left, total, stored = left - taken, total - taken, stored - 1
                call('ZREM', key, member)
                if held > taken then
                  member_at, weight, beyond = taken_at, held - taken, is_beyond
                  made = string.match(member, '@%d+')
                elseif weighted then
                  call('ZINCRBY', key, taken, '#')
                end
              end
            end
          end

          local from, upto = refunded_at, refunded_at
          local step_upto = refunded_at - refunded_at % step + step - 1
          if grain > 0 then
            from, upto = refunded_at - refunded_at % step, step_upto
          end
          local members = call('ZRANGEBYSCORE', key, math.max(from, expired + 1), upto, 'LIMIT', '0', budget - 1)
          take_back(members, false)
          -- A charge beyond the limit may have been merged with later ones.
          local reads = budget - 1 - #members
          if grain == 0 and left > 0 and stored > 0 and reads > 0 then
            from = math.max(refunded_at, expired) + 1
            take_back(call('ZREVRANGEBYSCORE', key, step_upto, from, 'LIMIT', '0', reads), true)
          end
          newest, room = nil, math.max(0, quota - total)
        end
      end

      if counted > 0 then
        -- Beyond the limit, which only charges go, one member holds those of one step: a flood of them adds few members.
        beyond = room == 0 and stored > 0 and grain == 0
        if cost == 1 and counted <= FEW and grain == 0 and not weighted and not beyond then
          -- Callers of the same check are a member each while they are few. A member of that name has that score, so adding
          -- it again changes nothing. Each attempt has another name, and there are no more than `stored` to meet.
          local missing = counted
          if held then
            missing = 0
          elseif counted == 1 then
            missing = 1 - call('ZADD', key, now_text, now_text)
          else
            local members = { now_text, now_text }
            for i = 2, counted do
              members[2 * i - 1], members[2 * i] = now_text, now_text .. '-' .. i
            end
            missing = counted - call('ZADD', key, unpack(members))
          end
          local attempt = missing > 0 and math.max(stored, FEW)
          while missing > 0 do
            attempt = attempt + 1
            missing = missing - call('ZADD', key, now_text, now_text .. '-' .. attempt)
          end
          total = total + counted
        else
          marked = weighted
          if not weighted then
            weighted, total = true, stored
          end
          member_at, weight = now, counted * cost
          if total + weight > MAX_TOTAL then
            weight = math.max(1, MAX_TOTAL - total)
          end
          total = total + weight
          if grain > 0 or beyond then
            local step = math.ceil(window / STEPS)
            local from = grain > 0 and grain_now.from or now - now % step
            local upto = grain > 0 and grain_now.upto or from + step - 1
            local limit = beyond and '1' or budget == BUDGET and 'MERGED' or budget - 1
            for _, member in ipairs(call('ZREVRANGEBYSCORE', key, upto, from, 'LIMIT', '0', limit)) do
              if not beyond or string.find(member, '~', 1, true) then
                local merged_at, merged = parts_of(member)
                member_at, weight = math.max(member_at, merged_at), weight + merged
                call('ZREM', key, member)
                stored = stored - 1
              end
            end
          end
        end
      end

      if weight then
        local score = member_at == now and now_text or string.format('%.0f', member_at)
        local name = beyond and score .. '~' or made and score .. made or score
        if weight > 1 then
          local digits = string.format('%.0f', weight)
          name = name .. ':' .. string.char(96 + #digits) .. digits
        end
        local member, attempt = name, stored
        while call('ZADD', key, score, member, -total - half, '#') == (marked and 0 or 1) do
          marked, attempt = true, attempt + 1
          member = name .. '-' .. attempt
        end
        stored = stored + 1
      end
      if stale then
        call('ZREMRANGEBYSCORE', key, '(0', expired_text)
      end
      if counted > 0 then
        local til = now + window
        if half > 0 then
          til = math.max(til, parts_of(call('ZRANGE', key, '-1', '-1')[1]) + window)
        end
        if expires_at ~= til then
          expires_at, expires_text = til, expiry(til)
        end
        call('PEXPIREAT', key, expires_text)
        room = room - counted * cost
        if room < 0 then
          room = 0
        end
        if not waits and half == 0 then
          return counted, room, 0, window
        end
        first = first and math.min(first, now)
      end

      local wait = 0
      if waits then
        wait = window
        local need = math.min(total + cost - quota, total)
        if need > 0 then
          if call('PTTL', key) == -1 then
            call('PEXPIREAT', key, expiry(now + window))
          end
          -- The time of the member that frees so much weight, or, past the budget, of the last one looked at.
          local freed_at = now
          if not weighted or stored == total then
            local rank = weighted and need or late + need - 1
            freed_at = rank == 0 and first or parts_of(call('ZRANGE', key, rank, rank)[1])
          else
            -- Most waits are for one of the first, which each charge may read.
            local from, size, bound = 1, 8, budget
            if reads < budget and not reserve then
              bound = math.min(budget, math.max(9, reads))
            end
            while need > 0 and from < bound and from <= stored do
              local upto = math.min(from + size, bound) - 1
              for _, member in ipairs(call('ZRANGE', key, from, upto)) do
                if need > 0 then
                  local member_at, weight = parts_of(member)
                  freed_at, need = member_at, need - weight
                end
              end
              from, size = upto + 1, size * 8
            end
            if reserve then
              reserve.bounded = need > 0
            else
              reads = reads - from
            end
          end
          wait = math.max(1, freed_at + window - now)
        end
      end

      -- The time until the newest member leaves.
      local reset = 0
      if counted > 0 and half == 0 then
        reset = window
      elseif counted > 0 or stored > late + gone then
        local member
        if half > 0 or not newest then
          member = call('ZRANGE', key, -1 - gone, -1 - gone)[1]
          newest = parts_of(member)
        end
        reset = newest + window - now
        if reset > window then
          local made = half > 0 and string.match(member, '@(%d+)')
          reset = made and tonumber(made) <= now + math.min(SLACK, window) and reset or window
        end
      end
      return counted, room, wait, reset
    end
  end
  rule = log
  if y > 0 then
    local from = now - now % y
    local upto = from + y - 1
    z = {
      from = string.format('%d%06d', (from - from % 1000000) / 1000000, from % 1000000),
      upto = string.format('%d%06d', (upto - upto % 1000000) / 1000000, upto % 1000000),
    }
  end
end
