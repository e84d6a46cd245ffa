-- The rule of a log that is not plain, within the function that begins in `lua/log_entries.lua`: it adds members, takes weight
-- back, and finds waits.

    -- Stores the window of a member that is added at this time.
    local function store_window(log, window, at)
      if window == log.window then
        return
      end
      local others, own = {}, { window, at + window }
      for i, longer in ipairs(log.longer) do
        others[i] = longer
      end
      if log.stored > 0 then
        others[#others + 1] = { log.window, parts_of(at_rank(log, -1)) + log.window }
      end
      local all = { own }
      for _, one in ipairs(others) do
        if one[1] == window then
          own[2] = math.max(own[2], one[2])
        else
          all[#all + 1] = one
        end
      end
      table.sort(all, function(a, b)
        return a[1] > b[1]
      end)
      -- Each is needed that is the longest at some time, and that of this member.
      local needed, latest = {}, now
      for _, one in ipairs(all) do
        if one[2] > latest or one == own then
          needed[#needed + 1] = one
        end
        latest = math.max(latest, one[2])
      end
      log.window = table.remove(needed)[1]
      while #needed > LONGER_WINDOWS do
        needed[1][2] = math.max(needed[1][2], table.remove(needed, 2)[2])
      end

      local left = {}
      for _, longer in ipairs(needed) do
        longer[3] = string.format('>%.0f', longer[1])
        call('ZADD', log.key, -longer[2], longer[3])
        left[longer[3]] = true
      end
      for _, longer in ipairs(log.longer) do
        if not left[longer[3]] then
          call('ZREM', log.key, longer[3])
        end
      end
      log.headers = log.headers - #log.longer + #needed
      log.longer = needed
    end

    -- Adds a member to a log whose weight has it already.
    local function put(log, at, mark, number, weight, window, text)
      local score = at == now and now_text or string.format('%.0f', at)
      local name = mark == '' and score or score .. mark .. string.format('%.0f', number)
      if weight > 1 then
        local digits = string.format('%.0f', weight)
        name = name .. ':' .. string.char(96 + #digits) .. digits
      end
      local header = header_of(log, window, text)
      local added = header == log.header and 1 or 2
      local member, attempt = name, log.stored
      while call('ZADD', log.key, score, member, -log.weight, header) < added do
        added, attempt = 1, attempt + 1
        member = name .. '-' .. attempt
      end
      log.stored = log.stored + 1
      if log.header ~= header then
        replace_header(log, header)
      end
    end

    local function first_of(at, mark, number)
      return (mark == ';' or mark == '~') and at - number or at
    end

    -- Adds the weight of an admission, or of a charge.
    local function add(log, counted, cost, quota, window, grain, text)
      local beyond = grain == 0 and log.stored > 0 and log.total >= quota
      store_window(log, window, now)
      if log.kind == '=' and cost == 1 and counted <= FEW and grain == 0 and not beyond then
        log.weight, log.total = log.weight + counted, log.total + counted
        describe(log, header_of(log, window, text))
        admit(log.key, counted, log.stored)
        log.stored = log.stored + counted
        return
      end

      local weight = counted * cost
      if log.weight + weight > MAX_TOTAL then
        weight = math.max(counted, MAX_TOTAL - log.weight)
      end
      log.kind = log.kind == '=' and '#' or log.kind
      log.weight, log.total = log.weight + weight, log.total + weight
      local first_at = now
      if grain > 0 or beyond then
        -- One ahead of the clock is a reservation, or of a clock that is gone.
        local step = grain > 0 and grain or math.ceil(window / STEPS)
        local limit = beyond and 1 or log.budget - 1
        for _, member in ipairs(call('ZREVRANGEBYSCORE', log.key, now_text, now - now % step, 'LIMIT', '0', limit)) do
          local at, merged, mark, number = parts_of(member)
          if not beyond or mark == '~' then
            weight = weight + merged
            first_at = math.min(first_at, first_of(at, mark, number))
            call('ZREM', log.key, member)
            log.stored = log.stored - 1
          end
        end
      end
      put(log, now, beyond and '~' or first_at < now and ';' or '', now - first_at, weight, window, text)
    end

    -- Takes weight back from the members with times from one to another that have an admission of the time `at`. Returns how much
    -- is left to take.
    local function take_back(log, from, upto, at, beyond, left, window, text)
      local members = call('ZRANGEBYSCORE', log.key, from, upto, 'LIMIT', '0', log.budget - 1)
      log.budget = log.budget - #members
      for _, member in ipairs(members) do
        local time, weight, mark, number = parts_of(member)
        if left > 0 and first_of(time, mark, number) <= at and (beyond or mark ~= '~') then
          local taken = math.min(left, weight)
          left = left - taken
          log.weight, log.total, log.stored = log.weight - taken, log.total - taken, log.stored - 1
          call('ZREM', log.key, member)
          if weight > taken then
            put(log, time, mark, number, weight - taken, window, text)
          elseif log.kind ~= '=' then
            call('ZINCRBY', log.key, taken, log.header)
          end
        end
      end
      return left
    end

    -- Takes weight back from what was added at that time, as far as it still counts.
    local function refund(log, at, cost, window, grain, text)
      local valid_from = now - window + 1
      local step = grain > 0 and grain or math.ceil(window / STEPS)
      local step_end = at - at % step + step - 1
      if grain > 0 then
        take_back(log, math.max(at, valid_from), step_end, at, at >= valid_from, cost, window, text)
      elseif at >= valid_from then
        local left = take_back(log, at, at, at, true, cost, window, text)
        -- Charges beyond the limit, and admissions under a limit with a precision, may be merged with later ones.
        if left > 0 then
          take_back(log, at + 1, step_end, at, true, left, window, text)
        end
      end
    end

    -- The time until a charge fits, and whether that is a lower bound: past the budget it is that of the last member read.
    local function wait(log, cost, quota, window, reserve)
      local need = math.min(log.total + cost - quota, log.total)
      if need <= 0 then
        return window, false
      end
      local first, freed_at = log.headers + log.skipped, now
      if log.kind == '=' or log.weight == log.stored then
        local member = at_rank(log, first + need - 1)
        freed_at, need = member and parts_of(member) or now, 0
      else
        -- Most waits are for one of the first, which each charge may read.
        local read, size, bound = 0, 8, log.budget - 1
        if reads < log.budget and not reserve then
          bound = math.min(bound, math.max(8, reads))
        end
        while need > 0 and read < bound and log.skipped + read < log.stored do
          local upto = math.min(read + size, bound)
          for _, member in ipairs(call('ZRANGE', log.key, first + read, first + upto - 1)) do
            if need > 0 then
              local at, weight = parts_of(member)
              freed_at, need = at, need - weight
            end
          end
          read, size = upto, size * 8
        end
        if not reserve then
          reads = reads - read
        end
      end
      local time = math.max(1, freed_at + window - now)
      -- One that is further ahead is of a clock that is gone.
      return log.kind == '@' and time or math.min(time, window + SLACK), need > 0
    end

    -- The time until nothing counts.
    local function reset(log, window)
      if log.stored <= log.gone then
        return 0
      end
      local member = at_rank(log, -1 - log.gone)
      local time = math.max(0, parts_of(member) + window - now)
      local made = log.kind == '@' and string.match(member, '@(%d+)')
      if made and tonumber(made) <= now + math.min(SLACK, log.longest) then
        return time
      end
      return math.min(window, time)
    end

    -- Sets the expiry to the time when the last member does not count under any window.
    local function set_expiry(log, window)
      local til = now + window
      if log.kind == '@' then
        til = math.max(til, parts_of(at_rank(log, -1)) + log.window)
      end
      for _, longer in ipairs(log.longer) do
        til = math.max(til, longer[2])
      end
      call('PEXPIREAT', log.key, expiry(til))
    end

    weighted = function(key, times, rest, cost, quota, window, grain, text, reserve, members, removed)
      local log = read(key, members, removed)
      find_longest(log, window, text)
      if log.stored > 0 then
        expire(log, window, grain, text)
        if operation == 'peek' or log.longest > window or log.kind == '=' then
          skip(log, window)
        end
        if times > 0 and quota - log.total < times * cost then
          forget(log, window, grain, text)
        end
      end

      local room, counted = math.max(0, quota - log.total), times
      if room < times * cost then
        counted = (room - room % cost) / cost
      end
      local waits, refunded_at = counted < times, nil
      if rest then
        local own_turn
        if reserve and waits and grain == 0 and log.late + log.gone == 0 then
          own_turn = reserve.turn_of(log.total + cost - quota, cost, quota, wait, log, cost, quota, window, reserve)
        end
        counted, waits, refunded_at = rest(room, counted, cost, quota, own_turn)
      end

      if reserve and counted > 0 and reserve.turn > now and grain == 0 then
        log.kind, log.weight = '@', log.weight + cost
        store_window(log, window, reserve.turn)
        put(log, reserve.turn, '@', now, cost, window, text)
        set_expiry(log, window)
        return counted, math.max(0, room - cost), now - reserve.turn, reset(log, window)
      end
      if refunded_at and log.stored > 0 then
        refund(log, refunded_at, cost, window, grain, text)
        room = math.max(0, quota - log.total)
      elseif counted > 0 then
        add(log, counted, cost, quota, window, grain, text)
        set_expiry(log, window)
        room = math.max(0, room - counted * cost)
      elseif waits then
        keep(key, now + log.longest)
      end

      local is_reset = counted > 0 and log.kind ~= '@'
      return counted, room, waits and wait(log, cost, quota, window, reserve) or 0, is_reset and window or reset(log, window)
    end
    return weighted
  end
end
