-- What a sliding log does where it is more than a count of equal members.
--
-- The name of a member is `time[;span][@made][~span][:weight][-attempt]`. A weight is written with a letter for its number of
-- digits (`:a5`, `:b10`), so that members of one time are in the order of their weights. A reservation is a member in the
-- future, and `@` is before the time when it was made. With a precision, admissions of one grain of time are one member, scored
-- with the last of them, and `;` is before the time since the first. Charges beyond the limit are merged in the same way, in
-- steps of a fraction of the window, and `~` is before that time.
--
-- Members with scores up to 0 describe the others. `=<window>`: all weigh 1, and are counted. `#<window>`: the score is minus
-- their weight. `@<window>`: the same, where there may be reservations. A member was stored under this window, or under a longer
-- one for which there is `><window>`, whose score is minus the time until which it is needed: no charge removes what counts under
-- another window. `+<window>` is `=<window>` beside longer ones.

if algorithm == 'log' and not make_weighted then
  function make_weighted()
    -- The time of a member, its weight, its mark, and the number that is behind the mark.
    local function parts_of(member)
      local plain_at = tonumber(member)
      if plain_at then
        return plain_at, 1, ''
      end
      local at, mark, number, weight = string.match(member, '^(%d+)([;@~]?)(%d*):?%a?(%d*)')
      return tonumber(at) or 0, tonumber(weight) or 1, mark or '', tonumber(number)
    end

    local function at_rank(log, rank)
      return call('ZRANGE', log.key, rank, rank)[1]
    end

    -- The weight of the members from one rank to another.
    local function weight_of(log, from, upto)
      local total = 0
      for _, member in ipairs(call('ZRANGE', log.key, from, upto)) do
        local _, weight = parts_of(member)
        total = total + weight
      end
      return total
    end

    -- `headers`: how many members describe the others, of which there are `stored`. `longer`: the longer windows, longest first.
    -- For the charge: `total` counts, without the oldest that are `skipped`; `late` have expired and may be in the total, `gone`
    -- are of a clock that is gone, and `budget` may still be read.
    local function read(key, members, removed)
      local log = { key = key, kind = '=', window = 0, longer = {}, headers = 0, weight = 0 }
      log.skipped, log.late, log.gone, log.budget = 0, 0, 0, BUDGET - math.min(removed or 0, BUDGET - 2)
      local described = call('ZRANGEBYSCORE', key, '-inf', '0', 'WITHSCORES', 'LIMIT', '0', 'HEADERS')
      for i = 1, #described, 2 do
        local kind, window = string.sub(described[i], 1, 1), tonumber(string.sub(described[i], 2))
        if window and kind == '>' then
          table.insert(log.longer, 1, { window, -described[i + 1], described[i] })
          log.headers = log.headers + 1
        elseif window and not log.header and string.find(kind, '[=+#@]') then
          kind = kind == '+' and '=' or kind
          log.header, log.kind, log.window, log.weight = described[i], kind, window, -described[i + 1]
          log.headers = log.headers + 1
        end
      end
      log.stored = (members or call('ZCARD', key)) - log.headers
      if log.kind == '=' then
        log.weight = log.stored
      elseif not (log.weight >= 0 and log.weight < EXACT) then
        log.weight = log.weight > 0 and EXACT - 1 or 0
      end
      log.total = log.weight
      return log
    end

    -- The name of the header for the kind and the window that the log has now.
    local function header_of(log, window, text)
      local kind = log.kind == '=' and #log.longer > 0 and '+' or log.kind
      return kind .. (log.window == window and text.digits or string.format('%.0f', log.window))
    end

    -- Removes the header that has been replaced by this one.
    local function replace_header(log, header)
      if log.header then
        call('ZREM', log.key, log.header)
      else
        log.headers = log.headers + 1
      end
      log.header = header
    end

    -- Writes the header if its name has changed, apart from a member.
    local function describe(log, header)
      if header ~= log.header then
        call('ZADD', log.key, log.kind == '=' and 0 or -log.weight, header)
        replace_header(log, header)
      end
    end

    -- Finds, after a removal, whether the log is of a simpler kind now. A reservation whose turn has come is an admission like
    -- others.
    local function simplify(log, window, grain, text)
      if log.kind == '@' and (log.stored == 0 or parts_of(at_rank(log, -1)) <= now) then
        log.kind = '#'
      end
      if log.kind == '#' and grain == 0 and log.stored > 0 and log.weight == log.stored then
        log.kind = '='
      end
      if log.header then
        describe(log, header_of(log, window, text))
      end
    end

    -- Removes `count` members, of which the first has this rank.
    local function remove(log, from, count)
      local upto, weight = from + count - 1, count
      if log.kind ~= '=' then
        weight = weight_of(log, from, upto)
        call('ZINCRBY', log.key, weight, log.header)
      end
      call('ZREMRANGEBYRANK', log.key, from, upto)
      log.stored, log.weight, log.budget = log.stored - count, log.weight - weight, log.budget - count
      return weight
    end

    -- Finds the longest window that is needed.
    local function find_longest(log, window, text)
      log.longest = math.max(window, log.window)
      for i = #log.longer, 1, -1 do
        local longer, til, name = unpack(log.longer[i])
        if til > now then
          log.longest = math.max(log.longest, longer)
        elseif operation ~= 'peek' then
          call('ZREM', log.key, name)
          table.remove(log.longer, i)
          log.headers = log.headers - 1
          describe(log, header_of(log, window, text))
        end
      end
    end

    -- Removes what has expired under that window, oldest first, within the budget.
    local function expire(log, window, grain, text)
      log.late = call('ZCOUNT', log.key, '(0', now - log.longest)
      local count = operation ~= 'peek' and math.min(log.late, log.budget - 2) or 0
      if count > 0 then
        remove(log, log.headers, count)
        log.late = log.late - count
        simplify(log, window, grain, text)
      end
      log.total = log.weight
    end

    -- Subtracts from the total the members that are stored, but are older than the window of the charge.
    local function skip(log, window)
      local old = call('ZCOUNT', log.key, '(0', now - window)
      local young = log.stored - old
      -- Of equal members the number is known; else the fewer of both are read.
      local members = log.kind == '=' and 0 or math.min(old, young)
      if old == 0 or members > log.budget - 2 then
        log.late = old
        return
      end
      local weight = old
      if log.kind ~= '=' and old <= young then
        weight = weight_of(log, log.headers, log.headers + old - 1)
      elseif log.kind ~= '=' then
        weight = log.weight - (young > 0 and weight_of(log, log.headers + old, -1) or 0)
      end
      log.total, log.skipped, log.late, log.budget = log.weight - weight, old, 0, log.budget - members
    end

    -- Removes what a clock that is gone has left after `ahead`, newest first, except for the reservations of this clock.
    local function remove_beside_reservations(log, ahead)
      local function is_reserved(member)
        local made = string.match(member, '@(%d+)')
        return made and tonumber(made) <= ahead
      end
      -- Where both ends belong to this clock, none is looked for between them: a long queue would be read each time.
      local after = '(' .. string.format('%.0f', ahead)
      local lowest = call('ZRANGEBYSCORE', log.key, after, '+inf', 'LIMIT', '0', '1')[1]
      if is_reserved(lowest) and is_reserved(at_rank(log, -1)) then
        log.gone = 0
        return
      end
      local members = call('ZREVRANGEBYSCORE', log.key, '+inf', after, 'LIMIT', '0', log.budget - 2)
      local removed, weight = {}, 0
      for _, member in ipairs(members) do
        if not is_reserved(member) then
          local _, one = parts_of(member)
          removed[#removed + 1], weight = member, weight + one
        end
      end
      log.gone = #removed == #members and log.gone - #removed or 0
      if #removed > 0 then
        call('ZINCRBY', log.key, weight, log.header)
        call('ZREM', log.key, unpack(removed))
      end
      log.budget, log.stored = log.budget - #members, log.stored - #removed
      log.weight, log.total = log.weight - weight, log.total - weight
    end

    -- Does so where a charge of this weight is denied.
    local function forget(log, window, grain, text)
      local ahead = now + math.min(SLACK, log.longest)
      log.gone = call('ZCOUNT', log.key, '(' .. string.format('%.0f', ahead), '+inf')
      if log.gone == 0 then
        return
      end
      if operation == 'peek' then
        local count, last = math.min(log.gone, log.budget - 2), log.headers + log.stored - 1
        if log.kind == '=' then
          log.total = log.total - log.gone
        elseif log.kind == '#' then
          log.total, log.budget = log.total - weight_of(log, last - count + 1, last), log.budget - count
        else
          -- Beside reservations they count until a check removes them.
          log.gone = 0
        end
        return
      end
      if log.kind == '@' then
        remove_beside_reservations(log, ahead)
      else
        local count = math.max(0, math.min(log.gone, log.budget - 2))
        if count > 0 then
          log.total = log.total - remove(log, log.headers + log.stored - count, count)
          log.gone = log.gone - count
        end
      end
      simplify(log, window, grain, text)
      if log.kind == '=' and log.gone > 0 then
        log.total = log.weight
        skip(log, window)
        log.total = log.total - log.gone
      end
    end
