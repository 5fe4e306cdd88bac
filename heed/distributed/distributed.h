// The public surface of heed_distributed, without mpi.h.
#ifndef HEED_DISTRIBUTED_DISTRIBUTED_H_
#define HEED_DISTRIBUTED_DISTRIBUTED_H_

#include "heed/distributed/attend.h"
#include "heed/distributed/attention.h"
#include "heed/distributed/group.h"
#include "heed/distributed/sequence.h"
#include "heed/distributed/shards.h"

#endif  // HEED_DISTRIBUTED_DISTRIBUTED_H_
