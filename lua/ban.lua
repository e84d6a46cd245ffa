-- Bans: since when denials of the next charge are counted, and how many there are; until when the last ban lasts; and its
-- level, the number of times that the next one is doubled. Denials and level are one number. Without denials, the first number
-- is the time when the last ban began.
--
-- The bans of a charge come before it. They deny it while a ban is in force, and count its denials otherwise. The operation `ban`
-- has bans alone: it begins one, or reads them.

if ban then
  -- Returns what is stored: since when denials are counted, how many there are, the end of the last ban, its level, and until
  -- when the key holds them.
  local function advance(key, window, longest)
    local since, packed, til, expires = fetch(key)
    local level = packed % LEVELS
    local denials = (packed - level) / LEVELS
    if since > now and since > now + math.min(SLACK, window) then
      -- The clock was set back. A ban that ends within the longest one stays, whichever policy has begun it.
      denials = 0
      if til > now + longest then
        since, til, level = 0, 0, 0
      end
    elseif denials > 0 and since + window <= now then
      denials = 0
    end
    return since, denials, til, level, expires
  end

  -- The level at a time after the last ban: one step less for each window without a ban.
  local function decayed(til, level, window)
    local span = now - til
    return math.max(0, level - (span - span % window) / window)
  end

  -- Counts a denial of the charge that the ban guards.
  local function deny(since, denials, til, level, quota, window, first, longest)
    denials = denials + 1
    if denials < quota then
      return denials == 1 and now or since, denials, til, level
    end
    level = decayed(til, level, window)
    local length = math.min(longest, first * 2 ^ level)
    return now, 0, now + length, length < longest and level + 1 or level
  end

  -- Whether a denial is not followed by another check of the request.
  local function is_final(request)
    if operation == 'wait' and request.waiting then
      return not request.leads
    end
    return operation == 'check' or operation == 'wait' and not request.may_wait
  end

  -- Decides the bans of a charge: counts a denial of it, or begins a ban of this length if it is above 0.
  function ban(key, times, rest, length, quota, window, first, longest, request)
    local since, denials, til, level, expires = advance(key, window, longest)
    local in_force = til > now
    local guarded = request.charge
    request.banned = in_force and guarded or request.banned
    rest(request, 0, in_force and 0 or times, 1)

    -- While one of the bans of a request is in force, none counts a denial.
    local watches = is_final(request) and not request.banned and quota < NEVER
    local denies = watches and guarded[C_COST] <= guarded[C_QUOTA] and guarded[C_RETRY] > 0
    local begins = operation == 'ban' and length > 0
    length = math.min(length, longest)
    if denies then
      since, denials, til, level = deny(since, denials, til, level, quota, window, first, longest)
    elseif begins and now + length > til then
      level = til <= now and decayed(til, level, window) or level
      since, denials, til = now, 0, now + length
    end

    local forgotten = til + level * window
    if denials > 0 and since + window > forgotten then
      forgotten = since + window
    end
    if denies or begins then
      write(key, since, denials * LEVELS + level, til, expires, forgotten)
    elseif in_force then
      keep(key, forgotten)
    end
    local reset = forgotten > now and forgotten - now or 0
    if til <= now then
      return 0, math.max(1, quota - denials), 0, reset
    end
    return 0, 0, til - now, reset
  end
end
