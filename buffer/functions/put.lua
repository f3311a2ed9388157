-- Opening tables, adding chunks, writing columns. The payload is in the server before the function runs (same
-- transaction); a refused call unlinks it again.

local function number_or_nil(text) return text ~= '' and tonumber(text) or nil end

local function same_shape(a, b)
  return a.scope == b.scope and a.ended == b.ended and table.concat(a.needs, ',') == table.concat(b.needs, ',')
    and a.selector == b.selector
end

-- open(schema fingerprint, random number, worker, columns, limits, stage...): create the table or compare; new stages are
-- added. The number names this state of the configuration. Replies {"ok", number of the client, {columns, limits, stage...},
-- {index of each added stage...}}, {"schema", theirs} or {"shape", name of the stage}.
register('open', function(keys, args)
  local prefix = keys[1]
  local packed, known, added = redis.call('GET', prefix .. KEY.config), {}, {}
  local blobs, changed = {args[4], args[5]}, false
  if packed then
    blobs = cmsgpack.unpack(packed)
    local theirs = cmsgpack.unpack(blobs[1]).schema
    if theirs ~= args[1] then return {'schema', theirs} end
    if blobs[2] ~= args[5] then blobs[2], changed = args[5], true end
    for k = 3, #blobs do known[cmsgpack.unpack(blobs[k]).name] = k end
  end
  for k = 6, #args do
    local stage = cmsgpack.unpack(args[k])
    local at = known[stage.name]
    if not at then
      blobs[#blobs + 1], changed = args[k], true
      if packed then added[#added + 1] = #blobs - 2 end
    elseif blobs[at] ~= args[k] then
      if not same_shape(stage, cmsgpack.unpack(blobs[at])) then return {'shape', stage.name} end
      blobs[at], changed = args[k], true
    end
  end
  if changed then
    local old = packed and open_table(keys)
    local state, fields = {}, base_of(#blobs - 1)
    for k = 1, fields do state[k] = old and old.state[k] or 0 end
    if old then
      for k = old.config.fields + 1, fields do state[k] = 0 end
      for _, i in ipairs(added) do state[base_of(i) + PAST] = state[ENDED] end
    else
      state[DUE] = math.huge
    end
    state[VERSION] = tonumber(args[2])
    redis.call('SET', prefix .. KEY.config, cmsgpack.pack(blobs))
    redis.call('SET', prefix .. KEY.state, struct.pack('<' .. string.rep('d', fields), unpack(state, 1, fields)))
  end
  local t = open_table(keys)
  t.state[CLIENTS] = t.state[CLIENTS] + 1
  redis.call('HSET', prefix .. KEY.clients, t.state[CLIENTS], args[3])
  commit(t)
  return {'ok', t.state[CLIENTS], blobs, added}
end, 'allow-oom')

-- attach(): {"ok", {columns, limits, stage...}}.
register('attach', function(keys)
  local packed = redis.call('GET', keys[1] .. KEY.config)
  if not packed then return {'unknown'} end
  return {'ok', cmsgpack.unpack(packed)}
end, 'no-writes')

-- adopt(chunk...): rows of these chunks meet the stages that were added after them. {"ok"}.
register('adopt', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  for _, id in ipairs(args) do
    local chunk = chunk_of(t, id)
    if chunk then
      chunk.dirty = true
      move(t, chunk, 0, chunk.n, 'settle', to_settled)
      join(t, chunk, 0, chunk.n)
      for i, stage in ipairs(t.stages) do
        local at = t.config.pos[i]
        if stage.min_batch > 1 and (has(chunk.runs, at, 119) or has(chunk.runs, at, 99)) then
          redis.call('ZADD', t.prefix .. KEY.open .. i, chunk.ordinal, id)
        end
      end
    end
  end
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- A piece in the arguments: chunk, first, count, unit, bytes, name.
local PIECE = 6

local function refuse(keys, args, at, reply)
  local names = {}
  for k = at, #args, PIECE do names[#names + 1] = keys[1] .. KEY.payload .. args[k] .. '/' .. args[k + 3] .. '.' .. args[k + 5] end
  unlink(nil, names)
  return reply
end

-- Unlink pieces that no chunk refers to: those of a repeated call.
local function drop_unreferenced(t, args, at)
  local names = {}
  for k = at, #args, PIECE do
    local chunk, unit, name = chunk_of(t, args[k]), tonumber(args[k + 3]), args[k + 5]
    local held = chunk and string.find(';' .. chunk.pieces[unit], ';' .. name .. ':', 1, true)
    if not held then names[#names + 1] = payload_key(t, args[k], unit .. '.' .. name) end
  end
  unlink(t, names)
end

-- Enter the piece in the chunk: what it replaces wholly is unlinked, rows have its columns from now on.
local function add_piece(t, chunk, first, count, unit, bytes, name, version, tag)
  local pieces = chunk.pieces[unit]
  if pieces ~= '' then
    local kept, replaced = {}, {}
    for entry in string.gmatch(pieces, '[^;]+') do
      local theirs, from, rows, size = string.match(entry, '^([^:]*):(%d+):(%d+):(%d+)')
      from, rows = tonumber(from), tonumber(rows)
      if theirs == name then
        bytes = bytes - tonumber(size)
      elseif from >= first and from + rows <= first + count then
        replaced[#replaced + 1] = payload_key(t, chunk.id, unit .. '.' .. theirs)
        bytes = bytes - tonumber(size)
      else
        kept[#kept + 1] = entry .. ';'
      end
    end
    unlink(t, replaced)
    pieces = table.concat(kept)
  end
  local entry = {name, first, count, bytes, t.now - chunk.at, version, tag}
  chunk.pieces[unit] = pieces .. table.concat(entry, ':') .. ';'
  chunk.bytes = chunk.bytes + bytes
  chunk.dirty = true
  t.state[BYTES] = t.state[BYTES] + bytes
  move(t, chunk, first, count, 'unit' .. unit, to_present, unit)
end

-- The ordinary stage with most rows to do: it must drain when the table is full.
local function slowest_stage(t)
  local worst, most = '', -1
  for i, stage in ipairs(t.stages) do
    local rows = stage_state(t, i, READY) + stage_state(t, i, LEASED)
    if not stage.ended and rows > most then worst, most = stage.name, rows end
  end
  return worst, most
end

-- Rows that the batch log knew before the server did: it came back older, and the chunk was put again.
local function end_logged(t, chunk)
  local at = t.prefix .. KEY.logged
  local noted = redis.call('HGET', at, chunk.id)
  if not noted then return end
  redis.call('HDEL', at, chunk.id)
  for stage, first, count, use, step in string.gmatch(noted, '(%d+):(%d+):(%d+):(%d+):(%d+);') do
    use_rows(t, chunk, tonumber(first), tonumber(count), tonumber(stage), tonumber(step), tonumber(use))
  end
end

-- put(schema fingerprint, producer, sequence, chunk, rows, group size, 1 to close, version, tokens, tag, pieces...):
-- {"ok", live rows}, {"known"}, {"schema", theirs}, or {"full", limit, value, most, stage, rows to do}.
register('put', function(keys, args)
  local t = open_table(keys)
  if not t then return refuse(keys, args, 11, {'unknown'}) end
  if t.config.schema ~= args[1] then return refuse(keys, args, 11, {'schema', t.config.schema}) end
  local sequence, id, rows = tonumber(args[3]), args[4], tonumber(args[5])
  local mark = redis.call('HGET', t.prefix .. KEY.marks, args[2])
  if mark and tonumber(mark) >= sequence then
    drop_unreferenced(t, args, 11)
    return {'known'}
  end
  local bytes = 0
  for k = 11, #args, PIECE do bytes = bytes + tonumber(args[k + 4]) end
  local limit = put_limit(t, rows, bytes)
  if limit then
    local stage, todo = slowest_stage(t)
    local value, most = string.format('%.17g', limit[2]), string.format('%.17g', limit[3])
    return refuse(keys, args, 11, {'full', limit[1], value, most, stage, todo})
  end
  redis.call('HSET', t.prefix .. KEY.marks, args[2], args[3])
  local state, config = t.state, t.config
  state[ORDINAL] = state[ORDINAL] + 1
  state[ADMITTED] = state[ADMITTED] + rows
  local pieces = {}
  for j = 1, #config.units do pieces[j] = '' end
  local sig = 'o0' .. string.rep('0', #config.units) .. string.rep('w0', #t.stages)
  local chunk = {
    id = id, n = rows, group = tonumber(args[6]), ordinal = state[ORDINAL], bytes = 0, at = t.now, last = -1, why = '',
    tokens = args[9], pieces = pieces, runs = {rows, number_or_nil(args[8]) or -1, sig}, before = NONE,
  }
  t.chunks[id] = chunk
  t.order[#t.order + 1] = chunk
  for k = 11, #args, PIECE do
    add_piece(t, chunk, 0, rows, tonumber(args[k + 3]), tonumber(args[k + 4]), args[k + 5], args[8], args[10])
  end
  join(t, chunk, 0, rows)
  if args[7] == '1' then state[CLOSED] = state[ORDINAL] end
  end_logged(t, chunk)
  commit(t)
  return {'ok', live_rows(t)}
end)

-- flush(): the rows put so far are complete.
register('flush', function(keys)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  t.state[CLOSED] = t.state[ORDINAL]
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- set_version(version): the trainer's; it only grows.
register('set_version', function(keys, args)
  local t = open_table(keys)
  if not t then return {'unknown'} end
  t.state[TRAINER] = math.max(t.state[TRAINER], tonumber(args[1]))
  t.roomier = true
  commit(t)
  return {'ok'}
end, 'allow-oom')

-- write(lease, call, 1 to ack, version, tokens, tag, pieces...): {"ok"} or {"fenced"}. Tokens are those of the lease's rows in order.
register('write', function(keys, args)
  local t = open_table(keys)
  if not t then return refuse(keys, args, 7, {'unknown'}) end
  local held = lease_of(t, args[1])
  if held and held.over and held.call == args[2] then
    drop_unreferenced(t, args, 7)
    return {'ok'}
  end
  if not held or held.over then
    t.state[FENCED] = t.state[FENCED] + 1
    commit(t)
    return refuse(keys, args, 7, {'fenced'})
  end
  local orphans, version = {}, number_or_nil(args[4])
  for k = 7, #args, PIECE do
    local chunk = chunk_of(t, args[k])
    local unit, name = tonumber(args[k + 3]), args[k + 5]
    if chunk then
      local first, count = tonumber(args[k + 1]), tonumber(args[k + 2])
      add_piece(t, chunk, first, count, unit, tonumber(args[k + 4]), name, args[4], args[6])
    else
      orphans[#orphans + 1] = payload_key(t, args[k], unit .. '.' .. name)
    end
  end
  unlink(t, orphans)
  local at = 0
  local f = held.fields
  for k = 5, #f, 3 do
    local chunk, first, count = chunk_of(t, f[k]), f[k + 1], f[k + 2]
    if chunk then
      if version then set_version(chunk, first, count, version) end
      if args[5] ~= '' then set_tokens(chunk, first, string.sub(args[5], 4 * at + 1, 4 * (at + count))) end
      if args[3] == '1' then ack_rows(t, chunk, held.stage, first, count) end
      join(t, chunk, first, count)
    end
    at = at + count
  end
  if args[3] == '1' then end_lease(t, held, args[2]) end
  commit(t)
  return {'ok'}
end)
